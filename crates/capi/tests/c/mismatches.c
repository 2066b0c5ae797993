/* Objects that do not belong together: of another protection domain, and of another context. And arguments out of range. */
#include "check.h"

static struct ibv_context *ctx, *other;
static struct ibv_pd *pd, *second, *foreign;

static struct ibv_mr *reg(struct ibv_pd *in, void *at)
{
	struct ibv_mr *mr = ibv_reg_mr(in, at, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
	TRUE(mr != NULL);
	return mr;
}

/* A pair of connected queue pairs. */
static void pair(struct end *a, struct end *b)
{
	*a = make_end(pd, IBV_QPT_RC), *b = make_end(pd, IBV_QPT_RC);
	connect_ends(a, b);
}

static void keys(void)
{
	struct end a, b;
	static char spare[4096];
	struct ibv_mr *mr = reg(second, spare);

	/* The sender's key. */
	pair(&a, &b);
	OK(post_recv(&b, 1, 64));
	struct ibv_sge sge = { .addr = (uintptr_t)spare, .length = 64, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	OK(ibv_post_send(a.qp, &wr, &bad));
	EQ(poll_one(a.cq).status, IBV_WC_LOC_PROT_ERR);
	free_end(&a), free_end(&b);

	/* The receiver's: the sender hears of it, the receiver gets its completion and an event. */
	pair(&a, &b);
	struct ibv_recv_wr recv = { .wr_id = 3, .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	OK(ibv_post_recv(b.qp, &recv, &bad_recv));
	OK(post_send(&a, 4, 64, IBV_SEND_SIGNALED));
	EQ(poll_one(a.cq).status, IBV_WC_REM_OP_ERR);
	struct ibv_wc wc = poll_one(b.cq);
	EQ(wc.status, IBV_WC_LOC_PROT_ERR);
	EQ(wc.wr_id, 3);
	struct ibv_async_event e;
	OK(ibv_get_async_event(ctx, &e));
	EQ(e.event_type, IBV_EVENT_QP_REQ_ERR);
	TRUE(e.element.qp == b.qp);
	ibv_ack_async_event(&e);
	free_end(&a), free_end(&b);

	/* The remote one. */
	pair(&a, &b);
	wr = (struct ibv_send_wr){ .wr_id = 5, .opcode = IBV_WR_RDMA_WRITE, .num_sge = 1, .sg_list = &sge,
		.wr.rdma = { .remote_addr = (uintptr_t)spare, .rkey = mr->rkey } };
	sge = (struct ibv_sge){ .addr = (uintptr_t)a.buf, .length = 64, .lkey = a.mr->lkey };
	OK(ibv_post_send(a.qp, &wr, &bad));
	EQ(poll_one(a.cq).status, IBV_WC_REM_ACCESS_ERR);
	OK(ibv_get_async_event(ctx, &e));
	EQ(e.event_type, IBV_EVENT_QP_ACCESS_ERR);
	ibv_ack_async_event(&e);
	free_end(&a), free_end(&b);
	OK(ibv_dereg_mr(mr));
}

/* An SRQ may be of another protection domain than its queue pairs: its receives' keys are of its own. */
static void srq_domain(void)
{
	static char spare[4096];
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(second, &init);
	struct ibv_mr *theirs = reg(second, spare), *ours = reg(pd, spare);
	for (int right = 1; right >= 0; right--) {
		struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
		OK(ibv_destroy_qp(b.qp));
		b.qp = make_qp(pd, b.cq, IBV_QPT_RC, srq, 0);
		connect_ends(&a, &b);
		struct ibv_sge sge = { .addr = (uintptr_t)spare, .length = 64, .lkey = right ? theirs->lkey : ours->lkey };
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
		OK(ibv_post_srq_recv(srq, &wr, &bad));
		OK(post_send(&a, 1, 64, IBV_SEND_SIGNALED));
		EQ(poll_one(a.cq).status, right ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR);
		EQ(poll_one(b.cq).status, right ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR);
		free_end(&a), free_end(&b);
	}
	OK(ibv_dereg_mr(ours));
	OK(ibv_dereg_mr(theirs));
	OK(ibv_destroy_srq(srq));
}

static void address_handle(void)
{
	struct end a = make_end(pd, IBV_QPT_UD);
	to_init(a.qp), to_rtr(a.qp, 0), to_rts(a.qp);
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh.dgid = own_gid(ctx) };
	struct ibv_ah *ah = ibv_create_ah(second, &attr);
	struct ibv_send_wr wr = { .opcode = IBV_WR_SEND, .wr.ud = { .ah = ah, .remote_qpn = a.qp->qp_num } }, *bad;
	OK(ibv_post_send(a.qp, &wr, &bad));
	EQ(poll_one(a.cq).status, IBV_WC_LOC_QP_OP_ERR);
	OK(ibv_destroy_ah(ah));
	attr.port_num = 2;
	IS_NULL(ibv_create_ah(pd, &attr), EINVAL);
	attr.port_num = 1, attr.grh.sgid_index = 127;
	IS_NULL(ibv_create_ah(pd, &attr), EINVAL);
	IS_NULL(ibv_create_ah(pd, NULL), EINVAL);
	free_end(&a);
}

/* Nothing of one context goes with something of another. */
static void contexts(void)
{
	struct ibv_cq *own = ibv_create_cq(ctx, 4, NULL, NULL, 0), *theirs = ibv_create_cq(other, 4, NULL, NULL, 0);
	struct ibv_comp_channel *channel = ibv_create_comp_channel(other);
	IS_NULL(ibv_create_cq(ctx, 4, NULL, channel, 0), EINVAL);
	struct ibv_qp_init_attr init = { .send_cq = own, .recv_cq = theirs, .qp_type = IBV_QPT_RC, .cap = { 1, 1, 1, 1, 0 } };
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	init.recv_cq = own, init.send_cq = theirs;
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	init.send_cq = own;
	IS_NULL(ibv_create_qp(foreign, &init), EINVAL);
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(foreign, &srq_init);
	init.srq = srq;
	IS_NULL(ibv_create_qp(pd, &init), EINVAL);
	struct ibv_srq_init_attr_ex tm = { .attr = { .max_wr = 4, .max_sge = 1 }, .srq_type = IBV_SRQT_TM, .pd = pd, .cq = theirs,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
		.tm_cap = { .max_num_tags = 1 } };
	IS_NULL(ibv_create_srq_ex(ctx, &tm), EINVAL);
	/* One that matches tags reaches its buffers through its queue pairs, so they share a domain. */
	tm.cq = own;
	struct ibv_srq *tags = ibv_create_srq_ex(ctx, &tm);
	TRUE(tags != NULL);
	init = (struct ibv_qp_init_attr){ .send_cq = own, .recv_cq = own, .srq = tags, .qp_type = IBV_QPT_RC };
	IS_NULL(ibv_create_qp(second, &init), EINVAL);
	OK(ibv_destroy_srq(tags));
	OK(ibv_destroy_srq(srq));
	struct ibv_pd *ours = ibv_alloc_pd(ctx);
	ours->context = other;
	REFUSES(ibv_dealloc_pd(ours), ENOENT);
	ours->context = ctx;
	OK(ibv_dealloc_pd(ours));
	OK(ibv_destroy_comp_channel(channel));
	OK(ibv_destroy_cq(theirs));
	OK(ibv_destroy_cq(own));
}

static void extensions(void)
{
	struct ibv_cq *cq = ibv_create_cq(ctx, 4, NULL, NULL, 0);
	const struct ibv_qp_init_attr_ex good = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .cap = { 1, 1, 1, 1, 0 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS, .pd = pd };
	struct ibv_qp_init_attr_ex a = good;
	const uint32_t flags[] = { IBV_QP_CREATE_SCATTER_FCS, IBV_QP_CREATE_CVLAN_STRIPPING, IBV_QP_CREATE_SOURCE_QPN,
		IBV_QP_CREATE_PCI_WRITE_END_PADDING };
	/* Not announced among the device's capabilities. */
	for (unsigned int i = 0; i < sizeof(flags) / sizeof(*flags); i++) {
		a = good, a.create_flags = flags[i];
		IS_NULL(ibv_create_qp_ex(ctx, &a), EOPNOTSUPP);
	}
	a = good, a.comp_mask |= IBV_QP_INIT_ATTR_MAX_TSO_HEADER, a.max_tso_header = 64;
	IS_NULL(ibv_create_qp_ex(ctx, &a), EOPNOTSUPP);
	a = good, a.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB, a.qp_type = IBV_QPT_RC;
	IS_NULL(ibv_create_qp_ex(ctx, &a), EINVAL);
	a.qp_type = IBV_QPT_UD;
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &a);
	TRUE(qp != NULL);
	/* The queues keep their sizes, and nobody has enhancements. */
	to_init(qp);
	struct ibv_qp_attr attr = { .cap = { 2, 2, 1, 1, 0 } };
	TRUE(ibv_modify_qp(qp, &attr, IBV_QP_CAP) != 0);
	struct ibv_ece ece = { 0 };
	REFUSES(ibv_query_ece(qp, &ece), EOPNOTSUPP);
	REFUSES(ibv_set_ece(qp, &ece), EOPNOTSUPP);
	REFUSES(ibv_set_ece(qp, NULL), EINVAL);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(cq));
}

int main(void)
{
	ctx = open_device(), other = open_device();
	pd = ibv_alloc_pd(ctx), second = ibv_alloc_pd(ctx), foreign = ibv_alloc_pd(other);
	keys();
	srq_domain();
	address_handle();
	contexts();
	extensions();
	OK(ibv_dealloc_pd(foreign));
	OK(ibv_dealloc_pd(second));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(other));
	OK(ibv_close_device(ctx));
	return 0;
}
