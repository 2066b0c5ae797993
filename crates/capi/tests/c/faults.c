/* Calls that a script of faults lets fail: the errno of the script, no effect, and the call behind it succeeds. */
#include "check.h"

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	static char memory[4096];

	TRUE(pd != NULL);
	struct ibv_mr *one = ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE);
	TRUE(one != NULL);
	IS_NULL(ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE), ENOMEM);
	struct ibv_mr *other = ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE);
	TRUE(other != NULL);
	IS_NULL(ibv_create_comp_channel(ctx), EMFILE);
	struct ibv_port_attr port;
	REFUSES(ibv_query_port(ctx, 1, &port), EIO);

	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	OK(post_recv(&b, 1, 64));
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 8, .lkey = a.mr->lkey };
	struct ibv_send_wr second = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED };
	struct ibv_send_wr first = second, *bad = NULL;
	first.next = &second;
	EQ(ibv_post_send(a.qp, &first, &bad), EAGAIN);
	TRUE(bad == &first);
	struct ibv_recv_wr recv = { .wr_id = 3 }, *bad_recv = NULL;
	EQ(ibv_post_recv(b.qp, &recv, &bad_recv), ENOMEM);
	TRUE(bad_recv == &recv);
	/* Nothing was posted: the next one is the first that arrives. */
	OK(ibv_post_send(a.qp, &second, &bad));
	EQ(poll_one(a.cq).wr_id, 2);
	EQ(poll_one(b.cq).wr_id, 1);
	free_end(&a), free_end(&b);
	OK(ibv_dereg_mr(one));
	OK(ibv_dereg_mr(other));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
