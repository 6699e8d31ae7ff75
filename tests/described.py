"""A machine with several NUMA nodes, as /sys would describe it, in a folder: for FCDP_SIM_ROOT."""


def describe(root, *cpus_of_nodes):
    """`root`, a path: each node gets the CPUs with these numbers."""
    everything = sorted(cpu for cpus in cpus_of_nodes for cpu in cpus)
    n = len(cpus_of_nodes)
    files = {"cpu/online": everything, "node/online": range(n), "node/has_memory": range(n)}
    for node, cpus in enumerate(cpus_of_nodes):
        files[f"node/node{node}/cpulist"] = cpus
    for name, numbers in files.items():
        path = root / "sys/devices/system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",".join(map(str, numbers)) + "\n")
    for node in range(n):
        distances = " ".join("10" if other == node else "21" for other in range(n))
        (root / f"sys/devices/system/node/node{node}/distance").write_text(distances + "\n")
    return root
