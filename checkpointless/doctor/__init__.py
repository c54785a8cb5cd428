"""What has to be changed on a node before a job can recover there; a check that fails is a finding itself."""
