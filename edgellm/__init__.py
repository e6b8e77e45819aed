"""edgellm, the control machine's side: decide, deploy, verify, report.

Data flows one way:

    inventory -> group_data -> Settings -> HostProfile -> TuningPlan -> operations -> templates
    -> SmokeResult -> HealthVerdict -> HostRecord -> FleetReport

Pure rooms (no I/O, never import pyinfra)
    cpuset      CpuSet: the kernel's cpulist <-> a sorted tuple
    parse       the host probe's output -> HostProfile
    hardware    Arch, CpuCluster, NumaNode, ..., HostProfile
    settings    Settings.from_host_data(dict): the one typed read of host data
    tuning      plan_tuning(profile, settings) -> TuningPlan, with its reasons
    release     ModelArtifact, Runtime, Release (id = content hash)
    gguf        the header of a model file
    health      SmokeResult, TtftBudget, judge() -> HealthVerdict
    report      HostRecord, FleetReport -> table, JSON
    errors      EdgellmError: host, what, want, have, fix

Rooms of the control machine's disk and network (never import pyinfra)
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
    recorder    pyinfra callbacks -> reports/<run>/

The other package, edgellm_server, runs on the hosts. Neither imports the other.
"""
