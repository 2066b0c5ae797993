"""What the scripts of this folder share: programs below `anyverbs run`, and faults while they run.

A script fails by an assertion or a time that is over. Its last line says what happened. Waiting ends with an event, such as a line
of a program's output; no script sleeps and hopes.

A script needs an empty folder to run in. `ANYVERBS` may say where the command is. `PYTHON` may say which Python has Mooncake or NCCL;
otherwise it is the one that runs the script.
"""
import atexit
import glob
import os
import subprocess
import sys
import time

ANYVERBS = os.environ.get("ANYVERBS", "anyverbs")
PYTHON = os.environ.get("PYTHON", sys.executable)
# Longer than anything takes here, on a machine with other work.
LIMIT = 100
# The reason of a request that failed because a rule took its packets, and its `vendor_err`. The rule is one of the peer's process,
# or an own one that `anyverbs fault` added. Tests of crates/proto/src/reason.rs and crates/transport/src/qp/faults/withheld.rs
# compare these with what the device says.
PEERS_RULE = "a script of faults of the peer's process asked for it"
OWN_RULE = "injected fault (added rule: {}): "
INJECTED = 9901

LEFT = [path for name in ("enough", "told", "done", "handle", "*.pid") for path in glob.glob(name)]
if LEFT:
    sys.exit(f"run this in an empty folder: {LEFT[0]} is of an earlier run")

started = []


class Program:
    """A program below `anyverbs run`, with a script of faults that has no rule yet. Its output goes to `NAME.out`."""

    def __init__(self, name, words, options, **variables):
        self.name = name
        shell = 'echo $$ > "$0.pid.new"; mv "$0.pid.new" "$0.pid"; exec "$@"'
        command = [ANYVERBS, "run", *options, "--faults", "seed 1", "--", "sh", "-c", shell, name, *words]
        with open(name + ".out", "wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **variables})
        started.append(self)

    def output(self):
        with open(self.name + ".out", encoding="utf-8", errors="replace") as file:
            return file.read()

    def says(self, *texts):
        """Waits until each of the texts is in its output."""
        for text in texts:
            wait_for(lambda: text in self.output() or self.process.poll() is not None, f"{self.name}: {text}")
            assert text in self.output(), f"{self.name} ended with {self.process.poll()} and did not say: {text}"

    def goes_on(self, line):
        """Waits until it has printed more lines that begin so than now."""
        count = lambda: sum(text.startswith(line) for text in self.output().splitlines())
        before = count()
        wait_for(lambda: count() > before or self.process.poll() is not None, f"{self.name} prints more of: {line}")
        assert count() > before, f"{self.name} ended with {self.process.poll()} before it printed more of: {line}"

    def ends(self):
        """Waits for its end, and returns its own status. The checker replaces a 0 only, and findings are judged apart."""
        wait_for(lambda: self.process.poll() is not None, f"the end of {self.name}")
        has_findings = "ANYVERBS_CHECK" in os.environ and self.process.returncode == 66
        return 0 if has_findings else self.process.returncode

    def runs(self):
        return self.process.poll() is None

    def number(self):
        """The number of its process."""
        wait_for(lambda: os.path.exists(self.name + ".pid"), f"the number of {self.name}")
        with open(self.name + ".pid", encoding="ascii") as file:
            return file.read().strip()


def take_down(process, device):
    """Takes the port of a device down in a process that runs, and sees that it is so."""
    anyverbs("fault", process, down(device))

    def is_down():
        lines = anyverbs("show", "process", process).splitlines()
        return any(line.split()[:2] == ["port", "down"] and device in line for line in lines)
    wait_for(is_down, f"a port of {device} that is down in process {process}")


def down(device):
    """The rule that takes the port of a device down."""
    return f"on device {device}: down after 0s"


def bring_up(process):
    """Ends all faults of a process."""
    anyverbs("fault", process, "clear")


def wait_for_timeout(device):
    """Waits until requests of a device's queue pair were not answered in their time."""
    before = counter("local_ack_timeout_err", device)
    wait_for(lambda: counter("local_ack_timeout_err", device) > before, f"an ACK timeout of {device}")


def counter(name, device):
    """A counter of one of two devices: all processes of the host together. Each port counts its own."""
    path = f"/sys/class/infiniband/{device}/ports/1/hw_counters/{name}"
    return int(anyverbs("run", "--devices", "2", "--", "cat", path))


def anyverbs(*words):
    said = subprocess.run([ANYVERBS, *words], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    return said.stdout


def wait_for(condition, what):
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"in {LIMIT} s there was not: {what}")
        time.sleep(0.02)


def stop():
    for program in started:
        if program.runs():
            program.process.terminate()
    for program in started:
        try:
            program.process.wait(5)
        except subprocess.TimeoutExpired:
            program.process.kill()
    # Failures are explained by what the programs said.
    if getattr(sys, "last_type", None):
        for program in started:
            print(f"---- {program.name}\n{program.output()[-4000:]}")


atexit.register(stop)
