"""How many cores of its machine each rank can count on."""

import os

import torch.distributed as dist


def for_each_rank(process_group):
    """Cores per rank on the machine where they are fewest, as every rank has it. A collective of the group's ranks."""
    reports = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(reports, report(), group=process_group)
    return fewest(reports)


def report():
    """What one rank knows: its machine, its container (by the network namespace), the cores that it may use there and
    the container's share of them in cores, None: all."""
    container = os.stat("/proc/self/ns/net").st_ino if os.path.exists("/proc/self/ns/net") else 0
    return _machine(), container, frozenset(os.sched_getaffinity(0)), _share()


def fewest(reports):
    """Cores per rank on the machine, or in the container, that has the fewest for its ranks."""
    machines, containers = {}, {}
    for machine, container, cores, share in reports:
        machines.setdefault(machine, []).append(cores)
        containers.setdefault((machine, container), []).append(share)
    of_machines = [len(frozenset().union(*ranks)) / len(ranks) for ranks in machines.values()]
    of_containers = [min(s) / len(s) for s in containers.values() if None not in s]
    return min(of_machines + of_containers)


def _machine():
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # /proc may be hidden in a container
        return os.uname().nodename


def _share():
    """The limit of this process' control group (version 2), in cores."""
    try:
        with open("/proc/self/cgroup") as file:
            path = next(line[3:].strip() for line in file if line.startswith("0::"))
        with open(f"/sys/fs/cgroup{path.rstrip('/')}/cpu.max") as file:
            quota, period = file.read().split()
    except (OSError, ValueError, StopIteration):
        return None
    return None if quota == "max" else int(quota) / int(period)
