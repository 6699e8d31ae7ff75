"""fcdp-lab: emulated nodes on one machine, to compare ways of training the same unmodified script.

cli       what the user types; modes and their syntax
lab       runs the modes, one sandbox per run; the only module that talks to the terminal
sandbox   the outside of a run: namespaces that die with the lab; `engine` is process 1 inside them
network   the switch, the links and their shape
probe     loaded into every rank: counters and digests at each optimizer step
failure   which rank failed first, and what it said
results   records of the ranks -> figures per mode; `report` and `figure` show them
"""
