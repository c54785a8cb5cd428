"""What of a node, or of all nodes of a job, has to be changed before a job can recover there.

Each family of checks is a module: a thin reader looks at the machine, and a pure judge makes findings of what was
read. Every check has a bound, and one that fails is a finding itself.
"""
