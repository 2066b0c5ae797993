/* Calls that are refused, each twice: the log says once why. Those at the end are what programs try out, and it says nothing. */
#include "check.h"
#include <stdint.h>

static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static void registers(void)
{
	static char buf[64];
	IS_NULL(ibv_reg_mr(pd, buf, 64, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	IS_NULL(ibv_reg_mr(pd, (void *)(UINTPTR_MAX - 63), 4096, 0), EINVAL);
	IS_NULL(ibv_reg_mr(pd, buf, 64, 1 << 15), EINVAL);
	/* By this programs ask whether the call is there. */
	IS_NULL(ibv_reg_dmabuf_mr(pd, 0, 64, 0, -1, 0), EBADF);
	IS_NULL(ibv_alloc_pd(NULL), EINVAL);
}

static void creates(void)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = 99, .cap = { 1, 1, 1, 1, 0 } };
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	init.qp_type = IBV_QPT_RC;
	init.send_cq = NULL;
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	IS_NULL(ibv_create_cq(ctx, 0, NULL, NULL, 0), EINVAL);
	IS_NULL(ibv_create_cq(ctx, 8, NULL, NULL, 7777), EINVAL);
	IS_NULL(ibv_create_cq(ctx, -1, NULL, NULL, 0), EINVAL);
	IS_NULL(ibv_create_cq(ctx, 8, NULL, NULL, -3), EINVAL);
	REFUSES(ibv_resize_cq(cq, 1 << 30), EINVAL);
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 9, .grh.dgid = own_gid(ctx) };
	IS_NULL(ibv_create_ah(pd, &ah), EINVAL);
	ah.port_num = 1;
	ah.grh.sgid_index = 77;
	IS_NULL(ibv_create_ah(pd, &ah), EINVAL);
	/* Nothing but the loopback is there. */
	ah.grh.sgid_index = 0;
	ah.grh.dgid = (union ibv_gid){ .raw = { [10] = 0xff, 0xff, 10, 9, 8, 7 } };
	IS_NULL(ibv_create_ah(pd, &ah), ENETUNREACH);
	struct ibv_srq_init_attr srq_init = { .attr = { 4, 1, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
	REFUSES(ibv_modify_srq(srq, &srq_init.attr, 0x14), EINVAL);
	OK(ibv_destroy_srq(srq));
}

static void modifies(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 1 << 30 };
	REFUSES(ibv_modify_qp(qp, &attr, IBV_QP_STATE | 1 << 28), EINVAL);
	REFUSES(ibv_modify_qp(qp, &attr, 0x7fffffff), EINVAL);
	REFUSES(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
		EINVAL);
}

/* Each state is another reason. */
static void sends_too_early(void)
{
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad;
	REFUSES(ibv_post_send(qp, &send, &bad), EINVAL);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	REFUSES(ibv_post_send(qp, &send, &bad), EINVAL);
	REFUSES(ibv_post_send(qp, &send, &bad), EINVAL);
	OK(ibv_destroy_qp(qp));
}

static void posts(struct end *e)
{
	struct ibv_sge sges[40] = { { (uintptr_t)e->buf, 8, e->mr->lkey } };
	struct ibv_recv_wr receive = { .sg_list = sges, .num_sge = 5 }, *bad_receive;
	REFUSES(ibv_post_recv(e->qp, &receive, &bad_receive), EINVAL);
	TRUE(bad_receive == &receive);
	receive.num_sge = -1;
	REFUSES(ibv_post_recv(e->qp, &receive, &bad_receive), EINVAL);
	struct ibv_send_wr send = { .sg_list = sges, .num_sge = 40 }, *bad_send;
	REFUSES(ibv_post_send(e->qp, &send, &bad_send), EINVAL);
	TRUE(bad_send == &send);
	send.num_sge = 1;
	send.opcode = 77;
	REFUSES(ibv_post_send(e->qp, &send, &bad_send), EINVAL);
	send.opcode = IBV_WR_SEND;
	send.send_flags = 1 << 20;
	REFUSES(ibv_post_send(e->qp, &send, &bad_send), EINVAL);
	send.send_flags = IBV_SEND_INLINE;
	sges[0].length = 4096;
	REFUSES(ibv_post_send(e->qp, &send, &bad_send), EINVAL);
}

/* What programs try out. */
static void tries(struct end *e)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { 1, 1, 1, 1, 1 << 30 } };
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	struct ibv_sge sge = { (uintptr_t)e->buf, 8, e->mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad;
	int ret = 0;
	for (int n = 0; !ret && n < 1000; n++)
		ret = ibv_post_recv(e->qp, &receive, &bad);
	EQ(ret, ENOMEM);
}

int main(void)
{
	ctx = open_device();
	pd = ibv_alloc_pd(ctx);
	cq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	struct ibv_qp *fresh = make_qp(pd, cq, IBV_QPT_RC, NULL, 0);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	sends_too_early();
	struct ibv_qp_attr migrates = { .path_mig_state = IBV_MIG_REARM };
	REFUSES(ibv_modify_qp(a.qp, &migrates, IBV_QP_PATH_MIG_STATE), EOPNOTSUPP);
	for (int n = 0; n < 2; n++) {
		registers();
		creates();
		modifies(fresh);
		posts(&a);
		tries(&a);
	}
	return 0;
}
