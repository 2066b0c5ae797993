#!/usr/bin/env python3
"""Random scripts of faults under the checking program: two processes of `conformance/c/exchange` on one host, each with a script of its own.

    unshare -rn sh -c 'ip link set lo up; python3 conformance/faults/random_scripts.py --rounds 1000'

Each process has rules about packets, and some have a port that is down for a while. Each round takes the way by shared memory or by UDP.

The promise: both processes end with 0, so all was done once, in order and with its bytes. Or both give up as they must where retries run
out: 3 is the right error in time, and 6 is what the other one sees. Nothing else, and nothing takes longer than ten minutes.

It needs `cc`, the headers of libibverbs, and the library: `cargo build -p anyverbs-capi`. `--first N` begins with the seed N, and a failure
names its seed.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["exchange.c", "exchange_side.c", "exchange_reliable.c", "exchange_unreliable.c", "waited.c"]
# Seconds until a process hangs. Its longest chain of retries takes two, and the program itself says what is late. A busy machine takes longer.
HANGS = 600
RIGHT, GAVE_UP, OTHER_ENDED = 0, 3, 6


def rule(dice):
    """A rule about packets."""
    first = dice.randint(1, 400)
    number = f"{first} to {first + dice.randint(0, 5)}"
    ms = dice.randint(1, 30)
    kind = dice.choice(["", "", "request ", "send ", "write ", "read ", "atomic ", "response ", "ack "])
    way = dice.choice(["", "sent ", "received "])
    chance = dice.choice([0.1, 1, 5, 10])
    span = dice.choice(["", "", " for 200ms", " after 50ms", " after 20ms for 100ms"])
    place = dice.choice(["", "", f"on qp {dice.randint(1, 4)}: "])
    return place + dice.choice([
        f"drop {way}{kind}packets {number}",
        f"drop {chance}% of {way}{kind}packets{span}",
        f"drop {way}{kind}packets after {ms}ms for 30ms",
        f"duplicate {way}{kind}packets {number}",
        f"duplicate {chance}% of {way}{kind}packets{span}",
        f"corrupt received {kind}packets {number}",
        f"reorder {chance}% of {kind}packets{span}",
        f"delay {chance}% of {kind}packets by 100us to {ms}ms{span}",
        f"mark {chance}% of received packets{span}",
        f"rnr {chance}% of received packets{span}",
        f"limit {kind}packets to {dice.randint(50, 500)}Mb/s{dice.choice(['', ' queue 20'])}",
        f"down for {dice.randint(10, 60)}ms after {ms}ms" if not place else f"drop packets {number}",
    ])


def script(dice, seed):
    rules, is_limited = [], False
    for _ in range(dice.randint(1, 4)):
        new = rule(dice)
        # A second limit may never do anything, and is refused then.
        if "limit" in new and is_limited:
            continue
        is_limited |= "limit" in new
        rules.append(new)
    return "\n".join([f"seed {seed}", *rules])


def round_of(seed, program, library):
    """Runs a round. The text of what went wrong, or None, and how it ended."""
    dice = random.Random(seed)
    shm = dice.choice(["0", "1"])
    work = ["-t", dice.choice(["rc", "rc", "xrc"]), "-n", "100", "-T", "13", "-S", str(seed % 0xFFFFFF + 1)]
    # Below the ports that the system hands out, and another one for each round under way.
    port = 10_000 + seed % 2_000 * 3
    running = []
    for end in (0, 1):
        text = script(dice, 2 * seed + end)
        env = os.environ | {
            "LD_LIBRARY_PATH": str(library),
            "ANYVERBS_REGISTRY": f"random-scripts-{os.getpid()}-{seed}",
            "ANYVERBS_UDP_PORT": str(port),
            "ANYVERBS_INTERFACES": "lo",
            "ANYVERBS_SHM": shm,
            "ANYVERBS_FAULTS": text,
        }
        command = [program, "-p", str(port + 1), *work, *([] if end == 0 else ["::1"])]
        child = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        running.append((text, child))
        if end == 0:
            listening(port + 1)
    codes, told = [], [f"seed {seed}, ANYVERBS_SHM={shm}, exchange {' '.join(work)}"]
    for text, child in running:
        try:
            output = child.communicate(timeout=HANGS)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            output = child.communicate()[0] + f"\nit still runs after {HANGS} s"
        codes.append(child.returncode)
        told += [f"--- ends with {child.returncode}, of the script:", text, "---", output]
    is_right = codes == [RIGHT, RIGHT] or GAVE_UP in codes and set(codes) <= {GAVE_UP, OTHER_ENDED}
    return (None if is_right else "\n".join(told)), codes == [RIGHT, RIGHT]


def listening(port):
    """Waits until somebody of this namespace listens at a port of TCP."""
    wanted = f":{port:04X} "
    while True:
        lines = Path("/proc/net/tcp6").read_text().splitlines()
        if any(wanted in line and " 0A " in line for line in lines):
            return


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=100)
    arguments.add_argument("--first", type=int, default=1, help="the first seed")
    arguments.add_argument("--at-once", type=int, default=4)
    arguments.add_argument("--library", type=Path, default=ROOT / "target/debug/libanyverbs_capi.so", help="the object of the library")
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/exchange"
        sources = [str(ROOT / "conformance/c" / name) for name in SOURCES]
        subprocess.run(["cc", "-D_GNU_SOURCE", "-O2", "-o", program, *sources, "-libverbs"], check=True)
        os.symlink(asked.library.resolve(), f"{folder}/libibverbs.so.1")
        seeds = range(asked.first, asked.first + asked.rounds)
        rounds = all_done = wrong = 0
        with ThreadPoolExecutor(asked.at_once) as pool:
            for text, is_done in pool.map(lambda seed: round_of(seed, program, folder), seeds):
                rounds += 1
                all_done += is_done
                if text:
                    wrong += 1
                    print(text, flush=True)
                if rounds % 100 == 0 or rounds == asked.rounds:
                    print(f"{rounds} rounds, seeds from {asked.first}: in {all_done} all was done, in {rounds - all_done - wrong} both ends gave up "
                          f"as they must, and {wrong} were wrong", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
