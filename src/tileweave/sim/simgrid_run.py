"""Run one exchange in SimGrid and print its seconds.

This is a separate program, because SimGrid has one engine per process and Debian's package is for
the Python of the system. It reads JSON from stdin: ``topology`` (star or torus), ``dims``, ``rate``
in bytes/s, ``latency`` in seconds, ``rounds`` (lists of [source, target, bytes]; each round starts
when the one before has arrived) and ``model``.
"""

import json
import sys

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, NetZone


def star(hosts, rate, latency):
    zone = NetZone.create_full_zone("all")
    links, made = [], []
    for number in range(hosts):
        made.append(zone.create_host(str(number), 1e9))
        links.append(
            [
                zone.create_link(f"{way}{number}", rate).set_latency(latency / 2).seal()
                for way in ("out", "in")
            ]
        )
    for a in range(hosts):
        for b in range(hosts):
            if a != b:
                route = [LinkInRoute(links[a][0]), LinkInRoute(links[b][1])]
                zone.add_route(made[a].netpoint, made[b].netpoint, None, None, route, False)
    zone.seal()


def torus(dims, rate, latency):
    """Unidirectional links; routes go dimension by dimension, the shorter way, or forwards if both
    are equal."""
    hosts = 1
    for side in dims:
        hosts *= side
    zone = NetZone.create_full_zone("all")
    made = [zone.create_host(str(number), 1e9) for number in range(hosts)]
    link = {}

    def place(number):
        found = []
        for side in dims:
            found.append(number % side)
            number //= side
        return found

    def number_of(at):
        total, scale = 0, 1
        for value, side in zip(at, dims, strict=True):
            total += value * scale
            scale *= side
        return total

    for number in range(hosts):
        for axis, side in enumerate(dims):
            for way in (1, -1):
                name = f"{number}.{axis}.{way}"
                link[number, axis, way] = (
                    zone.create_link(name, rate).set_latency(latency).seal() if side > 1 else None
                )
    for a in range(hosts):
        for b in range(hosts):
            if a == b:
                continue
            at, goal, route = place(a), place(b), []
            for axis, side in enumerate(dims):
                step = (goal[axis] - at[axis]) % side
                way = 1 if 2 * step <= side else -1
                while at[axis] != goal[axis]:
                    route.append(LinkInRoute(link[number_of(at), axis, way]))
                    at[axis] = (at[axis] + way) % side
            zone.add_route(made[a].netpoint, made[b].netpoint, None, None, route, False)
    zone.seal()


def exchange(rounds):
    for flows in rounds:
        comms = [
            Comm.sendto_async(Host.by_name(str(a)), Host.by_name(str(b)), int(size))
            for a, b, size in flows
        ]
        for comm in comms:
            comm.wait()


def main():
    asked = json.load(sys.stdin)
    options = [
        "--log=root.thresh:error",
        "--cfg=network/crosstraffic:0",
        "--cfg=network/TCP-gamma:0",
    ]
    # plain max-min fairness; otherwise SimGrid's calibrated TCP model
    if asked["model"] == "fluid":
        options += ["--cfg=network/model:CM02", "--cfg=network/weight-S:0"]
    engine = Engine([sys.argv[0], *options])
    if asked["topology"] == "torus":
        torus(asked["dims"], asked["rate"], asked["latency"])
    else:
        star(asked["dims"][0], asked["rate"], asked["latency"])
    Actor.create("exchange", Host.by_name("0"), exchange, asked["rounds"])
    engine.run()
    sys.stdout.write(f"seconds {engine.clock!r}\n")


if __name__ == "__main__":
    main()
