"""Open MPI over UCX with two rails, of which one fails.

    open_mpi_rails.py returns   the rail comes back while the device still repeats its requests: the job goes on, its data is right
    open_mpi_rails.py lost      it does not come back: the job ends in time, and says why
"""
import os
import sys

from rails import OWN_RULE, PEERS_RULE, Program, bring_up, down, take_down, wait_for_timeout


def main():
    returns = {"returns": True, "lost": False}[sys.argv[1]]
    variables = {"UCX_TLS": "rc_v,self", "UCX_NET_DEVICES": "anyverbs0:1,anyverbs1:1", "UCX_MAX_RNDV_RAILS": "2",
                 "UCX_HANDLE_ERRORS": "none", "UCX_LOG_LEVEL": "info",
                 "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if not returns:
        variables |= {"UCX_RC_VERBS_TIMEOUT": "100ms", "UCX_RC_VERBS_RETRY_COUNT": "3"}
    ring = os.path.join(os.path.dirname(sys.argv[0]), "mpi_ring.py")
    job = Program("job", ["mpirun", "-n", "2", "--oversubscribe", "--mca", "pml", "ucx", "/usr/bin/python3", ring],
                  ["--devices", "2"], **variables)
    job.goes_on("round ")
    assert "tag(rc_verbs/anyverbs0:1 rc_verbs/anyverbs1:1)" in job.output(), "both devices carry the messages"
    with open("rank1.pid", encoding="ascii") as file:
        rank = file.read()
    if returns:
        take_down(rank, "anyverbs1")
        wait_for_timeout("anyverbs1")
        bring_up(rank)
        job.says("the port of anyverbs1 is up again")
        job.goes_on("round ")
        open("enough", "w", encoding="ascii").close()
        assert job.ends() == 0, "the job ends well"
        job.says("rank 0: every byte is right", "rank 1: every byte is right")
        assert "failed with status" not in job.output(), "no request failed"
        print("a rail was down until requests had timed out, and the data of all messages is right")
    else:
        take_down(rank, "anyverbs1")
        assert job.ends() != 0, "the job fails"
        # Both ranks READ. The first one whose READ fails ends the job: that of the rule, or its peer.
        failed = "at 127.0.0.2 failed with status 12 (IBV_WC_RETRY_EXC_ERR): "
        reasons = PEERS_RULE, OWN_RULE.format(down("anyverbs1"))
        assert any(failed + reason in job.output() for reason in reasons), "a READ failed by the rule"
        job.says("transport retry counter exceeded")
        assert "every byte is right" not in job.output()
        print("a rail was lost, and the job ended with the cause")


main()
