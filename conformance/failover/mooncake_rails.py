"""Mooncake's transfer engine over four rails, of which one goes down twice. Its own failover finishes the transfers.

    mooncake_rails.py own    the port of the process that transfers
    mooncake_rails.py peer   the port of the process whose memory it is
"""
import os
import sys

from rails import PYTHON, Program, bring_up, take_down, wait_for


def main():
    own = {"own": True, "peer": False}[sys.argv[1]]
    engine = os.path.join(os.path.dirname(sys.argv[0]), "mooncake_rounds.py")
    options = ["--devices", "4"]
    server = Program("server", [PYTHON, engine, "server"], options)
    client = Program("client", [PYTHON, engine, "client"], options)
    client.goes_on("round ")
    faulty = client if own else server
    for time in (1, 2):
        take_down(faulty.number(), "anyverbs2")
        told(faulty, "Received context async event port error for context anyverbs2", time)
        if not own:
            # This process gets no event. It learns of the rail from requests that fail, and then avoids it for 30 s.
            client.says("Rail paused: peer=", "@anyverbs2 error_count=")
        client.goes_on("round ")
        bring_up(faulty.number())
        told(faulty, "Received context async event port active for context anyverbs2", time)
        client.goes_on("round ")
    open("enough", "w", encoding="ascii").close()
    assert (client.ends(), server.ends()) == (0, 0), "both end well"
    client.says("every byte is right")
    server.says("the server has the last WRITE")
    print("a rail was down twice, and the transfers went on over three others: the data is right")


def told(program, text, times):
    """Waits until a program has said a text so many times."""
    wait_for(lambda: program.output().count(text) >= times, f"{program.name}, {times} times: {text}")


main()
