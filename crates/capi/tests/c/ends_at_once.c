/* The log says why work failed, though the program ends as soon as it has polled the completion. */
#include "check.h"

#include <unistd.h>

static void fail_and_end(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	struct ibv_sge sge = { (uintptr_t)a.buf, 8, a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.rdma.remote_addr = (uintptr_t)b.buf;
	wr.wr.rdma.rkey = b.mr->rkey + 1;
	OK(ibv_post_send(a.qp, &wr, &bad));
	struct ibv_wc wc;
	while (ibv_poll_cq(a.cq, 1, &wc) == 0)
		;
	_exit(wc.status == IBV_WC_REM_ACCESS_ERR ? 0 : 1);
}

int main(int argc, char **argv)
{
	(void)argv;
	if (argc > 1)
		fail_and_end();
	char self[4096] = {0}, command[5000], line[4096];
	TRUE(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
	snprintf(command, sizeof command, "'%s' child 2>&1", self);
	for (int n = 0; n < 30; n++) {
		FILE *child = popen(command, "r");
		TRUE(child != NULL);
		int requester = 0, responder = 0;
		while (fgets(line, sizeof line, child) != NULL) {
			requester += strstr(line, "failed with status 10") != NULL;
			responder += strstr(line, "refus") != NULL;
		}
		OK(pclose(child));
		EQ(requester, 1);
		TRUE(responder > 0);
	}
	return 0;
}
