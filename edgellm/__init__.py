"""edgellm, the control machine's side: decide, deploy, verify, report.

Data flows one way:

    inventory -> group_data -> Settings -> HostProfile -> TuningPlan -> templates -> DesiredState
    -> operations -> SmokeResult -> HealthVerdict -> HostRecord -> FleetReport
    DesiredState, ObservedState -> KnobState (deploys/audit.py, and the proof after a roll-out)

Pure rooms (no I/O, never import pyinfra)
    cpuset      CpuSet: the kernel's cpulist <-> a sorted tuple
    parse       the host probe's output -> HostProfile
    hardware    Arch, CpuCluster, NumaNode, ..., HostProfile
    settings    Settings.from_host_data(dict): the one typed read of host data
    tuning      plan_tuning(profile, settings) -> TuningPlan, with its reasons
    release     ModelArtifact, Runtime, Release (id = content hash)
    layout      every path on a host that is ours
    desired     all that is wanted of a host: DesiredState, its files and its artifacts
    observed    all that was found on it: EffectiveState, ServiceState, PathState
    drift       compare(desired, observed) -> a KnobState each, with the reason
    gguf        the header of a model file
    health      SmokeResult, TtftBudget, judge() -> HealthVerdict
    comparison  the plan against a plain start -> ratios with their spread
    progress    how far each host is -> the rows of the live table
    diagnosis   what diagnose.sh printed -> the files of a bundle
    redaction   a text without keys, prompts and answers
    report      HostRecord, FleetReport -> table, JSON, exit code
    errors      EdgellmError: host, what, want, have, fix

Rooms of the control machine's disk and network (never import pyinfra)
    reports/        fleet.json -> the other files of reports/<run>/
    report_files    FleetReport -> reports/: a directory a run, history.jsonl
    inventory       fleet YAML -> Fleet -> pyinfra groups
    model_source    hub, https, wheel or path -> verified ModelArtifact
    runtime_build   requirements/host.txt + edgellm_server -> Runtime archive
    server_app      the operator's own ASGI app -> files of the release
    render          TuningPlan + Settings -> the text of every file on the host

pyinfra rooms
    facts/      what is on a host: one script, one round trip each
    operations/ what changes a host, and is silent where it is already so
    steps/      one @deploy each, in the order of deploys/qwen.py
    prepare     host -> Context; a bad host fails alone
    live        the table while a run executes, on a terminal
    recorder    pyinfra callbacks -> reports/<run>/

The other package, edgellm_server, runs on the hosts. Neither imports the other.
"""
