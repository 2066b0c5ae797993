/* Calls that are refused, each twice: the log says once why. */
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
	ah.grh.dgid = (union ibv_gid){ .raw = { 0xfd, [15] = 1 } };
	IS_NULL(ibv_create_ah(pd, &ah), ENETUNREACH);
	ah.grh.dgid = (union ibv_gid){ .raw = { [10] = 0xff, 0xff, 255, 255, 255, 255 } };
	IS_NULL(ibv_create_ah(pd, &ah), ENETUNREACH);
	struct ibv_srq_init_attr srq_init = { .attr = { 4, 1, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
	REFUSES(ibv_modify_srq(srq, &srq_init.attr, 0x14), EINVAL);
	OK(ibv_destroy_srq(srq));
}

/* A connection to an address of another family is told at RTR, and the completion has the same cause. */
static void connects_by_no_way(void)
{
	union ibv_gid dgid = { .raw = { 0xfd, [15] = 2 } };
	struct end e = make_end(pd, IBV_QPT_RC);
	to_init(e.qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512, .dest_qp_num = 0x123456, .max_dest_rd_atomic = 1,
		.min_rnr_timer = 1, .ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = dgid, .hop_limit = 64 } } };
	OK(ibv_modify_qp(e.qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 8, .retry_cnt = 1 };
	OK(ibv_modify_qp(e.qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					      IBV_QP_MAX_QP_RD_ATOMIC));
	OK(post_send(&e, 1, 8, IBV_SEND_SIGNALED));
	struct ibv_wc wc = poll_one(e.cq);
	EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
	EQ(wc.vendor_err, 1202);
	free_end(&e);
}

static void modifies(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 1 << 30 };
	REFUSES(ibv_modify_qp(qp, &attr, IBV_QP_STATE | 1 << 28), EINVAL);
	REFUSES(ibv_modify_qp(qp, &attr, 0x7fffffff), EINVAL);
	REFUSES(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
		EINVAL);
	to_init(qp);
	struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512, .dest_qp_num = 1 << 24, .max_dest_rd_atomic = 200,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh.dgid = own_gid(ctx) } };
	int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
		   IBV_QP_MIN_RNR_TIMER;
	REFUSES(ibv_modify_qp(qp, &rtr, mask), EINVAL);
	rtr.dest_qp_num = 1;
	REFUSES(ibv_modify_qp(qp, &rtr, mask), EINVAL);
	rtr.qp_state = IBV_QPS_RESET;
	OK(ibv_modify_qp(qp, &rtr, IBV_QP_STATE));
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

/* Programs try these out: the first refusal of each object is said. */
static void tries(struct end *e, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { 1, 1, 1, 1, 1 << 30 } };
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	init.cap.max_inline_data /= 2;
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	struct ibv_sge sge = { (uintptr_t)e->buf, 8, e->mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad;
	int ret = 0;
	for (int n = 0; !ret && n < 1000; n++)
		ret = ibv_post_recv(e->qp, &receive, &bad);
	EQ(ret, ENOMEM);
	ret = 0;
	for (int n = 0; !ret && n < 1000; n++)
		ret = ibv_post_srq_recv(srq, &receive, &bad);
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
	struct ibv_srq_init_attr srq_init = { .attr = { 4, 1, 0 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &srq_init);
	for (int n = 0; n < 2; n++) {
		registers();
		creates();
		modifies(fresh);
		posts(&a);
		tries(&a, srq);
	}
	connects_by_no_way();
	return 0;
}
