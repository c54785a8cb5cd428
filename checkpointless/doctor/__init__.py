"""What has to be changed on a node before a job can recover there.

A reader looks at the machine, and a pure judge makes findings of what was read. Every check has a bound, and one
that fails is a finding itself.
"""
