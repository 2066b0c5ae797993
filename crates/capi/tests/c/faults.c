/* Calls that a script of faults lets fail: the errno of the script, no effect, and the call behind it succeeds. */
#include "check.h"
#include <fcntl.h>
#include <rdma/rdma_cma.h>

/* A call that ends an object and fails leaves it there. */
static void fail_to_end(struct ibv_context *ctx, struct ibv_pd *pd)
{
	static char memory[64];
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 64, 0);
	REFUSES(ibv_dereg_mr(mr), EBUSY);
	OK(ibv_dereg_mr(mr));
	struct ibv_cq *cq = ibv_create_cq(ctx, 32, NULL, NULL, 0);
	TRUE(cq != NULL);
	REFUSES(ibv_resize_cq(cq, 64), ENOSYS);
	OK(ibv_resize_cq(cq, 64));
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &attr);
	TRUE(srq != NULL);
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	REFUSES(ibv_destroy_qp(qp), ESRCH);
	OK(ibv_destroy_qp(qp));
	REFUSES(ibv_destroy_srq(srq), EBUSY);
	OK(ibv_destroy_srq(srq));
	REFUSES(ibv_destroy_cq(cq), EBUSY);
	OK(ibv_destroy_cq(cq));
	IS_NULL(ibv_alloc_mw(pd, IBV_MW_TYPE_1), EPROTO);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	TRUE(mw != NULL);
	OK(ibv_dealloc_mw(mw));
	struct ibv_xrcd_init_attr domain = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = -1, .oflags = O_CREAT };
	IS_NULL(ibv_open_xrcd(ctx, &domain), EIO);
	struct ibv_xrcd *xrcd = ibv_open_xrcd(ctx, &domain);
	TRUE(xrcd != NULL);
	OK(ibv_close_xrcd(xrcd));
}

static void fail_by_cm(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	TRUE(channel != NULL);
	OK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	/* It would wait. */
	MINUS_ONE(rdma_get_cm_event(channel, &event), ENOTCONN);
	MINUS_ONE(rdma_disconnect(id), EXDEV);
	OK(rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
}

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

	struct ibv_device_attr device;
	union ibv_gid gid;
	struct ibv_gid_entry entry;
	REFUSES(ibv_query_device(ctx, &device), EDQUOT);
	OK(ibv_query_device(ctx, &device));
	MINUS_ONE(ibv_query_gid(ctx, 1, 0, &gid), 4095);
	REFUSES(ibv_query_gid_ex(ctx, 1, 0, &entry, 0), 4095);
	OK(ibv_query_gid(ctx, 1, 0, &gid));
	fail_to_end(ctx, pd);
	fail_by_cm();

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
