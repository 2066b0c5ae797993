/* S3.4, "Bad input, everywhere": NULL, stale and foreign pointers, garbled handles and enums. */
#include "check.h"

static void nulls(void)
{
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	union ibv_gid gid;
	__be16 pkey;
	struct ibv_async_event event;
	struct ibv_qp_attr qa = { 0 };
	struct ibv_srq_attr sa = { 0 };
	struct ibv_wc wc;

	IS_NULL(ibv_open_device(NULL), EINVAL);
	MINUS_ONE(ibv_close_device(NULL), EINVAL);
	IS_NULL(ibv_get_device_name(NULL), EINVAL);
	EQ(ibv_get_device_guid(NULL), 0);
	REFUSES(ibv_query_device(NULL, &attr), EINVAL);
	/* The inline of ibv_query_port reads the context that it is given. */
	REFUSES((ibv_query_port)(NULL, 1, (struct _compat_ibv_port_attr *)&port), EINVAL);
	MINUS_ONE(ibv_query_gid(NULL, 1, 0, &gid), EINVAL);
	MINUS_ONE(ibv_query_pkey(NULL, 1, 0, &pkey), EINVAL);
	MINUS_ONE(ibv_get_async_event(NULL, &event), EINVAL);
	ibv_ack_async_event(NULL);
	IS_NULL(ibv_alloc_pd(NULL), EINVAL);
	REFUSES(ibv_dealloc_pd(NULL), EINVAL);
	IS_NULL((ibv_reg_mr)(NULL, &attr, sizeof attr, 0), EINVAL);
	REFUSES(ibv_dereg_mr(NULL), EINVAL);
	MINUS_ONE(ibv_rereg_mr(NULL, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0), EINVAL);
	IS_NULL(ibv_create_comp_channel(NULL), EINVAL);
	REFUSES(ibv_destroy_comp_channel(NULL), EINVAL);
	struct ibv_cq *cq;
	void *cookie;
	MINUS_ONE(ibv_get_cq_event(NULL, &cq, &cookie), EINVAL);
	ibv_ack_cq_events(NULL, 1);
	IS_NULL(ibv_create_cq(NULL, 1, NULL, NULL, 0), EINVAL);
	REFUSES(ibv_destroy_cq(NULL), EINVAL);
	REFUSES(ibv_resize_cq(NULL, 1), EINVAL);
	IS_NULL(ibv_create_qp(NULL, NULL), EINVAL);
	REFUSES(ibv_modify_qp(NULL, &qa, IBV_QP_STATE), EINVAL);
	REFUSES(ibv_query_qp(NULL, &qa, 0, NULL), EINVAL);
	REFUSES(ibv_destroy_qp(NULL), EINVAL);
	IS_NULL(ibv_qp_to_qp_ex(NULL), EINVAL);
	IS_NULL(ibv_create_srq(NULL, NULL), EINVAL);
	REFUSES(ibv_modify_srq(NULL, &sa, IBV_SRQ_LIMIT), EINVAL);
	REFUSES(ibv_query_srq(NULL, &sa), EINVAL);
	REFUSES(ibv_destroy_srq(NULL), EINVAL);
	IS_NULL(ibv_create_ah(NULL, NULL), EINVAL);
	REFUSES(ibv_destroy_ah(NULL), EINVAL);
	IS_NULL(ibv_create_ah_from_wc(NULL, &wc, NULL, 1), EINVAL);
}

static void garbled(struct ibv_context *ctx)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct end e = make_end(pd, IBV_QPT_RC);
	struct ibv_srq_init_attr si = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &si);
	TRUE(srq != NULL);

	struct ibv_qp_init_attr qi = { .send_cq = e.cq, .recv_cq = e.cq, .qp_type = IBV_QPT_RC };
	struct ibv_qp_attr qa = { .qp_state = IBV_QPS_INIT };
	struct ibv_srq_attr sa = { 0 };
	pd->handle ^= 0xffff;
	IS_NULL(ibv_create_qp(pd, &qi), ENOENT);
	IS_NULL(ibv_create_srq(pd, &si), ENOENT);
	IS_NULL((ibv_reg_mr)(pd, e.buf, 16, 0), ENOENT);
	REFUSES(ibv_dealloc_pd(pd), ENOENT);
	pd->handle ^= 0xffff;
	e.cq->handle ^= 0xffff;
	IS_NULL(ibv_create_qp(pd, &qi), ENOENT);
	REFUSES(ibv_destroy_cq(e.cq), ENOENT);
	e.cq->handle ^= 0xffff;
	srq->handle ^= 0xffff;
	qi.srq = srq;
	IS_NULL(ibv_create_qp(pd, &qi), ENOENT);
	qi.srq = NULL;
	REFUSES(ibv_query_srq(srq, &sa), ENOENT);
	REFUSES(ibv_destroy_srq(srq), ENOENT);
	srq->handle ^= 0xffff;
	e.qp->handle ^= 0xffff;
	REFUSES(ibv_modify_qp(e.qp, &qa, IBV_QP_STATE), ENOENT);
	REFUSES(ibv_query_qp(e.qp, &qa, 0, &qi), ENOENT);
	REFUSES(ibv_destroy_qp(e.qp), ENOENT);
	e.qp->handle ^= 0xffff;
	e.mr->handle ^= 0xffff;
	REFUSES(ibv_dereg_mr(e.mr), ENOENT);
	e.mr->handle ^= 0xffff;

	/* A pointer of another kind. */
	REFUSES(ibv_dealloc_pd((struct ibv_pd *)e.mr), EINVAL);
	REFUSES(ibv_destroy_cq((struct ibv_cq *)e.qp), EINVAL);
	OK(ibv_destroy_srq(srq));
	free_end(&e);
	OK(ibv_dealloc_pd(pd));
}

/* Suites test their own code on devices that they made up: a name is where the struct has it. */
static void made_up(void)
{
	struct ibv_device device = { .name = "mock0" };
	TRUE(strcmp(ibv_get_device_name(&device), "mock0") == 0);
	IS_NULL(ibv_open_device(&device), EINVAL);
	EQ(ibv_get_device_guid(&device), 0);
	EQ(ibv_get_device_index(&device), -1);
}

static void stale(struct ibv_context *ctx)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct end e = make_end(pd, IBV_QPT_UD);
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(ctx) } };
	struct ibv_ah *ah = ibv_create_ah(pd, &attr);
	TRUE(ah != NULL);
	/* S3.4: where that can be known. */
	OK(ibv_destroy_ah(ah));
	REFUSES(ibv_destroy_ah(ah), EINVAL);
	struct end copy = e;
	free_end(&e);
	REFUSES(ibv_destroy_qp(copy.qp), EINVAL);
	REFUSES(ibv_dereg_mr(copy.mr), EINVAL);
	REFUSES(ibv_destroy_cq(copy.cq), EINVAL);
	OK(ibv_dealloc_pd(pd));
	REFUSES(ibv_dealloc_pd(pd), EINVAL);
}

static void enums(struct ibv_context *ctx)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	struct ibv_qp_init_attr qi = { .send_cq = a.cq, .recv_cq = a.cq };

	/* S2.3 */
	qi.qp_type = IBV_QPT_DRIVER;
	IS_NULL(ibv_create_qp(pd, &qi), EOPNOTSUPP);
	/* A target is made of an XRC domain. */
	int unknown[] = { 0, 1, 5, 7, IBV_QPT_XRC_RECV, 11, 0x7fffffff, -1 };
	for (int i = 0; i < 8; i++) {
		qi.qp_type = unknown[i];
		IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	}
	struct ibv_qp_attr qa = { .qp_state = 77, .port_num = 1 };
	REFUSES(ibv_modify_qp(a.qp, &qa, IBV_QP_STATE), EINVAL);
	REFUSES(ibv_modify_qp(a.qp, &qa, 1 << 30), EINVAL);
	REFUSES(ibv_modify_qp(a.qp, NULL, IBV_QP_STATE), EINVAL);
	qa.qp_state = IBV_QPS_INIT;
	qa.qp_access_flags = 1 << 15;
	REFUSES(ibv_modify_qp(a.qp, &qa, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), EINVAL);
	EQ(a.qp->state, IBV_QPS_RESET);
	IS_NULL((ibv_reg_mr)(pd, a.buf, 16, 1 << 15), EINVAL);
	IS_NULL((ibv_reg_mr)(pd, a.buf, 16, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	MINUS_ONE(ibv_rereg_mr(a.mr, 8, pd, a.buf, 16, 0), EINVAL);
	IS_NULL(ibv_create_cq(ctx, 0, NULL, NULL, 0), EINVAL);
	IS_NULL(ibv_create_cq(ctx, -1, NULL, NULL, 0), EINVAL);
	IS_NULL(ibv_create_cq(ctx, 1, NULL, NULL, ctx->num_comp_vectors), EINVAL);
	IS_NULL(ibv_create_cq(ctx, 1, NULL, NULL, -1), EINVAL);

	/* S5.9: opcodes that do not exist, flags that do not exist. */
	connect_ends(&a, &b);
	struct ibv_send_wr wr = { .opcode = 99 }, *bad = NULL;
	REFUSES(ibv_post_send(a.qp, &wr, &bad), EINVAL);
	TRUE(bad == &wr);
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = 1 << 20;
	REFUSES(ibv_post_send(a.qp, &wr, &bad), EINVAL);
	wr.send_flags = 0;
	wr.num_sge = -1;
	REFUSES(ibv_post_send(a.qp, &wr, &bad), EINVAL);
	wr.num_sge = 1;
	REFUSES(ibv_post_send(a.qp, &wr, &bad), EINVAL);
	wr.num_sge = 0x7fffffff;
	REFUSES(ibv_post_send(a.qp, &wr, &bad), EINVAL);
	/* bad_wr may be left out, and names the request in the middle of a list. */
	REFUSES(ibv_post_send(a.qp, &wr, NULL), EINVAL);
	struct ibv_send_wr first = { .opcode = IBV_WR_SEND, .next = &wr };
	REFUSES(ibv_post_send(a.qp, &first, &bad), EINVAL);
	TRUE(bad == &wr);
	struct ibv_wc wc;
	MINUS_ONE(ibv_poll_cq(a.cq, -1, &wc), EINVAL);
	MINUS_ONE(ibv_poll_cq(a.cq, 1, NULL), EINVAL);
	EQ(ibv_poll_cq(a.cq, 0, NULL), 0);
	free_end(&a), free_end(&b);
	OK(ibv_dealloc_pd(pd));
}

int main(void)
{
	nulls();
	struct ibv_context *ctx = open_device();
	made_up();
	garbled(ctx);
	stale(ctx);
	enums(ctx);
	OK(ibv_close_device(ctx));
	MINUS_ONE(ibv_close_device(ctx), EINVAL);
	return 0;
}
