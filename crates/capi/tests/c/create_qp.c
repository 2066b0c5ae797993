/* S2: what a queue pair is created with. S5.1, S5.11 and the smaller rules: what its queues refuse. */
#include "check.h"

static void sizes(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_device_attr dev;
	OK(ibv_query_device(pd->context, &dev));
	/* S2.2: zero-sized queues are legal, more than the device has is not. */
	struct ibv_qp_init_attr qi = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC };
	struct ibv_qp *qp = ibv_create_qp(pd, &qi);
	TRUE(qp != NULL);
	/* S2.5 */
	TRUE(qp->qp_num > 1 && qp->qp_num < 0xffffff);
	uint32_t num = qp->qp_num;
	OK(ibv_destroy_qp(qp));
	/* rdma_xclient asks for no room for inline data, and uses that of its one element. */
	qi.cap = (struct ibv_qp_cap){ .max_send_wr = 1, .max_send_sge = 1 };
	qp = ibv_create_qp(pd, &qi);
	TRUE(qp != NULL && qi.cap.max_inline_data >= 16);
	OK(ibv_destroy_qp(qp));
	qi.cap.max_send_wr = 5;
	qi.cap.max_recv_wr = 3;
	qi.cap.max_send_sge = 2;
	qi.cap.max_recv_sge = 4;
	qi.cap.max_inline_data = 100;
	qp = ibv_create_qp(pd, &qi);
	TRUE(qp != NULL && qp->qp_num != num);
	TRUE(qi.cap.max_send_wr >= 5 && qi.cap.max_recv_wr >= 3 && qi.cap.max_send_sge >= 2);
	TRUE(qi.cap.max_recv_sge >= 4 && qi.cap.max_inline_data >= 100);
	struct ibv_qp_attr qa;
	struct ibv_qp_init_attr back;
	OK(ibv_query_qp(qp, &qa, IBV_QP_STATE | IBV_QP_CAP, &back));
	TRUE(!memcmp(&back.cap, &qi.cap, sizeof qi.cap) && !memcmp(&qa.cap, &qi.cap, sizeof qi.cap));
	TRUE(back.send_cq == cq && back.recv_cq == cq && back.srq == NULL);
	EQ(back.qp_type, IBV_QPT_RC);
	EQ(qa.qp_state, IBV_QPS_RESET);
	OK(ibv_destroy_qp(qp));

	struct ibv_qp_cap good = qi.cap;
	qi.cap.max_send_wr = dev.max_qp_wr + 1;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.cap = good, qi.cap.max_recv_wr = dev.max_qp_wr + 1;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.cap = good, qi.cap.max_send_sge = dev.max_sge + 1;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.cap = good, qi.cap.max_inline_data = 1 << 20;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	/* S2.1 */
	qi.cap = good, qi.send_cq = NULL;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	IS_NULL(ibv_create_qp(pd, NULL), EINVAL);

	/* S2.4 */
	struct ibv_srq_init_attr si = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &si);
	qi.send_cq = cq, qi.srq = srq, qi.qp_type = IBV_QPT_UC;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.qp_type = IBV_QPT_XRC_SEND;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.qp_type = IBV_QPT_RAW_PACKET;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.qp_type = IBV_QPT_UD;
	qi.cap.max_recv_wr = dev.max_qp_wr + 1;
	qp = ibv_create_qp(pd, &qi);
	TRUE(qp != NULL);
	to_init(qp);
	struct ibv_recv_wr wr = { 0 }, *bad = NULL;
	REFUSES(ibv_post_recv(qp, &wr, &bad), EINVAL);
	TRUE(bad == &wr);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_srq(srq));
}

static void queues(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	/* S5.11 */
	REFUSES(post_recv(&a, 1, 1), EINVAL);
	REFUSES(post_send(&a, 1, 1, 0), EINVAL);
	connect_ends(&a, &b);
	/* Receive queue full; too many elements. */
	for (int i = 0; i < 8; i++)
		OK(post_recv(&b, i, 64));
	REFUSES(post_recv(&b, 8, 64), ENOMEM);
	struct ibv_sge three[3] = { { 0 } };
	struct ibv_recv_wr wr = { .sg_list = three, .num_sge = 3 }, *bad = NULL;
	REFUSES(ibv_post_recv(a.qp, &wr, &bad), EINVAL);
	TRUE(bad == &wr);

	/* S5.1: only the completion that is polled frees slots. */
	for (int i = 0; i < 7; i++)
		OK(post_send(&a, i, 16, 0));
	OK(post_send(&a, 7, 16, IBV_SEND_SIGNALED));
	REFUSES(post_send(&a, 8, 16, 0), ENOMEM);
	for (int i = 0; i < 8; i++) {
		struct ibv_wc wc = poll_one(b.cq);
		EQ(wc.status, IBV_WC_SUCCESS);
		EQ(wc.wr_id, i);
		EQ(wc.byte_len, 16);
	}
	REFUSES(post_send(&a, 8, 16, 0), ENOMEM);
	EQ(poll_one(a.cq).wr_id, 7);

	/* S2.2: inline data is taken at the post. */
	OK(post_recv(&b, 20, 64));
	memset(b.buf, 0, 64);
	char text[64] = "as it was at the post";
	struct ibv_sge sge = { .addr = (uintptr_t)text, .length = sizeof text };
	struct ibv_send_wr swr = { .wr_id = 20, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED }, *sbad;
	OK(ibv_post_send(a.qp, &swr, &sbad));
	memset(text, 'x', sizeof text);
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	EQ(strcmp(b.buf, "as it was at the post"), 0);
	EQ(poll_one(a.cq).wr_id, 20);
	/* Longer than it was asked for at creation. */
	sge.length = 65;
	REFUSES(ibv_post_send(a.qp, &swr, &sbad), EINVAL);

	/* S5.5: no elements, no keys. */
	OK(post_recv(&b, 30, 64));
	swr.num_sge = 0, swr.wr_id = 30, swr.send_flags = IBV_SEND_SIGNALED;
	OK(ibv_post_send(a.qp, &swr, &sbad));
	struct ibv_wc wc = poll_one(b.cq);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.byte_len, 0);
	EQ(poll_one(a.cq).wr_id, 30);
	free_end(&a), free_end(&b);
}

/* The extended creation call and ibv_wr_*: all of a batch or nothing. */
static void batches(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	EQ(ibv_qp_to_qp_ex(a.qp) == NULL, 1);
	OK(ibv_destroy_qp(a.qp));
	struct ibv_qp_init_attr_ex ex = { .send_cq = a.cq, .recv_cq = a.cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 4, .max_send_sge = 1, .max_inline_data = 32 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS };
	ex.send_ops_flags = IBV_QP_EX_WITH_TSO;
	IS_NULL(ibv_create_qp_ex(pd->context, &ex), EOPNOTSUPP);
	ex.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
	ex.comp_mask |= 1 << 30;
	IS_NULL(ibv_create_qp_ex(pd->context, &ex), EINVAL);
	ex.comp_mask &= ~(1 << 30);
	a.qp = ibv_create_qp_ex(pd->context, &ex);
	TRUE(a.qp != NULL);
	struct ibv_qp_ex *qx = ibv_qp_to_qp_ex(a.qp);
	TRUE(qx != NULL);
	connect_ends(&a, &b);
	for (int i = 0; i < 4; i++)
		OK(post_recv(&b, i, 64));

	/* An operation that was not asked for; nothing of the batch is posted. */
	ibv_wr_start(qx);
	qx->wr_id = 1, qx->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qx);
	ibv_wr_set_sge(qx, a.mr->lkey, (uintptr_t)a.buf, 8);
	ibv_wr_rdma_write(qx, 1, 2);
	REFUSES(ibv_wr_complete(qx), EOPNOTSUPP);
	/* One more than the queue takes: nothing is posted. */
	ibv_wr_start(qx);
	for (int i = 0; i < 5; i++)
		ibv_wr_send(qx);
	REFUSES(ibv_wr_complete(qx), ENOMEM);
	/* Aborted. */
	ibv_wr_start(qx);
	ibv_wr_send(qx);
	ibv_wr_abort(qx);
	/* Data without a request; too much inline data; no start. */
	ibv_wr_start(qx);
	ibv_wr_set_sge(qx, a.mr->lkey, (uintptr_t)a.buf, 8);
	REFUSES(ibv_wr_complete(qx), EINVAL);
	ibv_wr_start(qx);
	ibv_wr_send(qx);
	ibv_wr_set_inline_data(qx, a.buf, 33);
	REFUSES(ibv_wr_complete(qx), EINVAL);
	ibv_wr_send(qx);
	REFUSES(ibv_wr_complete(qx), EINVAL);
	struct ibv_wc wc;
	EQ(ibv_poll_cq(a.cq, 1, &wc), 0);

	ibv_wr_start(qx);
	char text[16] = "inline";
	qx->wr_id = 7;
	ibv_wr_send_imm(qx, htobe32(0x12345678));
	ibv_wr_set_inline_data(qx, text, sizeof text);
	memset(text, 'x', sizeof text);
	OK(ibv_wr_complete(qx));
	wc = poll_one(b.cq);
	EQ(wc.wr_id, 0);
	EQ(wc.wc_flags & IBV_WC_WITH_IMM, IBV_WC_WITH_IMM);
	EQ(be32toh(wc.imm_data), 0x12345678);
	EQ(strcmp(b.buf, "inline"), 0);
	EQ(poll_one(a.cq).wr_id, 7);
	free_end(&a), free_end(&b);
}

/* What this device has not: a vendor's enhancements, and alternate paths. */
static void not_there(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	struct ibv_ece ece = { .vendor_id = 7, .options = 7, .comp_mask = 7 };
	REFUSES(ibv_query_ece(a.qp, &ece), EOPNOTSUPP);
	EQ(ece.vendor_id, 0);
	EQ(ece.options, 0);
	EQ(ece.comp_mask, 0);
	REFUSES(ibv_set_ece(a.qp, &ece), EOPNOTSUPP);
	ece.vendor_id = 7;
	REFUSES(ibv_set_ece(a.qp, &ece), EOPNOTSUPP);

	struct ibv_device_attr device;
	OK(ibv_query_device(ctx, &device));
	EQ(device.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG, 0);
	connect_ends(&a, &b);
	struct ibv_qp_attr attr = { .alt_port_num = 1, .alt_timeout = 14, .path_mig_state = IBV_MIG_REARM,
		.alt_ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(ctx), .hop_limit = 9 } } };
	REFUSES(ibv_modify_qp(a.qp, &attr, IBV_QP_ALT_PATH), EOPNOTSUPP);
	REFUSES(ibv_modify_qp(a.qp, &attr, IBV_QP_PATH_MIG_STATE), EOPNOTSUPP);
	struct ibv_qp_init_attr init;
	memset(&attr, 0xff, sizeof(attr));
	OK(ibv_query_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE, &init));
	EQ(attr.qp_state, IBV_QPS_RTS);
	EQ(attr.path_mig_state, IBV_MIG_MIGRATED);
	EQ(attr.alt_port_num, 0);
	EQ(attr.alt_timeout, 0);
	EQ(attr.alt_pkey_index, 0);
	free_end(&a), free_end(&b);
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	sizes(pd, cq);
	queues(pd);
	batches(pd);
	not_there(ctx, pd);
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
