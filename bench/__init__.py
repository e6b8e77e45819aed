"""What our server gains over the common way, measured on this machine, both in one run.

    python -m bench.server    every row of the table, the two servers taking turns
    python -m bench.soak      our server alone, for half an hour, under clients that misbehave
    python -m bench.probe_accuracy    the probe's stopwatch against the packets on the wire

  weights.py       the model both servers read
  requantise.py    the published file -> Q4_0, run by the common way's Python
  common_way.py    the other server; common_venv.py: its venv
  plan.py          what the roll-out would plan for this machine -> our server's environment
  servers.py       starting and ending both
  bare_load.py     the engine's own load, to compare a start with
  prompts.py       what clients ask
  load.py          clients, timed by probe.py's stopwatch
  neighbours.py    busy processes, and CPU weights
  process_tree.py  memory and CPU time of a server
  rounds.py        the measurements
  stats.py         figures -> value and spread; results.py: -> table and JSON

stats, prompts and results are pure. Results of whole runs are kept in bench/results/.
"""
