"""UCX over two rails, of which one fails. UCX 1.13 has no failover between the lanes of an endpoint.

    ucx_rails.py returns    the rail comes back while the device still repeats its requests: `ucx_perftest` notices nothing
    ucx_rails.py lost       it does not come back: both ends are told by the error handlers of their endpoints
"""
import sys

from rails import PEERS_RULE, Program, bring_up, take_down, wait_for_timeout

LANES = "tag(rc_verbs/anyverbs0:1 rc_verbs/anyverbs1:1)"
# It prints one each second.
REPORT = "[thread 0]"


def main():
    returns = {"returns": True, "lost": False}[sys.argv[1]]
    variables = {"UCX_TLS": "rc_v,self", "UCX_NET_DEVICES": "anyverbs0:1,anyverbs1:1", "UCX_MAX_RNDV_RAILS": "2",
                 "UCX_HANDLE_ERRORS": "none", "UCX_LOG_LEVEL": "info"}
    test = ["-t", "tag_bw", "-s", str(1 << 20), "-n", "15000", "-w", "10"]
    if not returns:
        # -e: endpoints that report errors. The peer hears by a keepalive.
        test += ["-e"]
        variables |= {"UCX_RC_VERBS_TIMEOUT": "100ms", "UCX_RC_VERBS_RETRY_COUNT": "3", "UCX_KEEPALIVE_INTERVAL": "1s"}
    options = ["--devices", "2"]
    server = Program("server", ["stdbuf", "-oL", "ucx_perftest", "-p", "20000", *([] if returns else ["-e"])], options, **variables)
    server.says("Waiting for connection")
    client = Program("client", ["stdbuf", "-oL", "ucx_perftest", "-p", "20000", "127.0.0.1", *test], options, **variables)
    client.goes_on(REPORT)
    assert LANES in client.output() and LANES in server.output(), "both devices carry the messages"
    if returns:
        take_down(client.number(), "anyverbs1")
        wait_for_timeout("anyverbs1")
        assert server.runs() and client.runs(), "the rail is down while they talk"
        bring_up(client.number())
        client.says("the port of anyverbs1 is up again")
        client.goes_on(REPORT)
        assert (client.ends(), server.ends()) == (0, 0), "both end well"
        assert "Final:" in client.output()
        assert "failed with status" not in client.output() + server.output(), "no request failed"
        print("a rail was down until requests had timed out, and 15000 messages of 1 MiB came")
    else:
        take_down(client.number(), "anyverbs1")
        # The server fetches the messages by READs. The second device has the address 127.0.0.2.
        server.says(f"at 127.0.0.2 failed with status 12 (IBV_WC_RETRY_EXC_ERR): {PEERS_RULE}",
                    "error handler called with status -80 (Endpoint timeout)")
        client.says("error handler called with status -25 (Connection reset by remote peer)")
        print("a rail was lost, and the error handlers of both ends were called")


main()
