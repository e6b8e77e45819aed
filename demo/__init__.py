"""A real little fleet on this machine: systemd as PID 1 and sshd in every host.

fleet.py      the command line and `Fleet`: up, down, exec, reboot, faults
image.py      the root file system that all hosts share, built once by mmdebstrap
container.py  one host: its disk, its namespaces, its boot loop
forward.py    127.0.0.1 of this machine -> a host's sshd, and a host's own 127.0.0.1
processes.py  process ids that are safe to signal; flock on a directory
syscalls.py   the Linux calls that Python 3.10 lacks
errors.py     DemoError: what, want, have, fix
"""
