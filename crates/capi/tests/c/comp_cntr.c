/* Completion counters, of rdma-core 65: what counts, who is busy, what is refused. */
#include "check.h"

/* The headers of rdma-core 44 do not have them. */
struct cntr { struct ibv_context *context; uint32_t handle; };
struct cntr_caps { uint64_t max_value; uint32_t max_counters, supported_qp_attach_ops; };
struct cntr_attr { uint32_t comp_mask, type, flags; };
struct attach_attr { uint32_t comp_mask, op_mask; };
enum { SEND = 1, RECV = 2, READ = 4, REMOTE_READ = 8, WRITE = 16, REMOTE_WRITE = 32, WRS = 0, BYTES = 1 };
int _ibv_query_comp_cntr_caps(struct ibv_context *, struct cntr_caps *, size_t);
struct cntr *ibv_create_comp_cntr(struct ibv_context *, struct cntr_attr *);
int ibv_destroy_comp_cntr(struct cntr *);
int ibv_qp_attach_comp_cntr(struct ibv_qp *, struct cntr *, struct attach_attr *);
int ibv_set_comp_cntr(struct cntr *, uint64_t), ibv_set_err_comp_cntr(struct cntr *, uint64_t);
int ibv_inc_comp_cntr(struct cntr *, uint64_t), ibv_inc_err_comp_cntr(struct cntr *, uint64_t);
int ibv_read_comp_cntr(struct cntr *, uint64_t *), ibv_read_err_comp_cntr(struct cntr *, uint64_t *);

static struct ibv_context *ctx;

static struct cntr *make(uint32_t type)
{
	struct cntr_attr a = { .type = type };
	struct cntr *c = ibv_create_comp_cntr(ctx, &a);
	TRUE(c != NULL && c->context == ctx);
	return c;
}

static int attach(struct ibv_qp *qp, struct cntr *c, uint32_t ops)
{
	struct attach_attr a = { .op_mask = ops };
	return ibv_qp_attach_comp_cntr(qp, c, &a);
}

static void reaches(struct cntr *c, uint64_t want)
{
	uint64_t got;
	double until = now() + 10;
	do
		OK(ibv_read_comp_cntr(c, &got));
	while (got != want && now() < until);
	EQ(got, want);
}

static uint64_t errors(struct cntr *c)
{
	uint64_t got;
	OK(ibv_read_err_comp_cntr(c, &got));
	return got;
}

static void one_sided(struct end *a, struct end *b, enum ibv_wr_opcode op, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = len, .lkey = a->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = op,
		.wr.rdma = { .remote_addr = (uintptr_t)b->buf, .rkey = b->mr->rkey } }, *bad;
	OK(ibv_post_send(a->qp, &wr, &bad));
}

int main(void)
{
	ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct cntr_caps caps;
	OK(_ibv_query_comp_cntr_caps(ctx, &caps, sizeof(caps)));
	EQ(caps.max_value, -1);
	TRUE(caps.max_counters > 0);
	EQ(caps.supported_qp_attach_ops, 63);
	REFUSES(_ibv_query_comp_cntr_caps(ctx, NULL, sizeof(caps)), EINVAL);
	struct cntr_attr attr = { .flags = 1 };
	IS_NULL(ibv_create_comp_cntr(ctx, &attr), EINVAL);
	attr = (struct cntr_attr){ .comp_mask = 1 };
	IS_NULL(ibv_create_comp_cntr(ctx, &attr), EINVAL);
	attr = (struct cntr_attr){ .type = 2 };
	IS_NULL(ibv_create_comp_cntr(ctx, &attr), EOPNOTSUPP);
	IS_NULL(ibv_create_comp_cntr(ctx, NULL), EINVAL);

	/* Numbers, and wrapping. */
	struct cntr *sends = make(WRS), *bytes = make(BYTES), *remote = make(WRS), *received = make(BYTES);
	OK(ibv_set_comp_cntr(sends, -2));
	OK(ibv_inc_comp_cntr(sends, 5));
	reaches(sends, 3);
	OK(ibv_set_err_comp_cntr(sends, 7));
	OK(ibv_inc_err_comp_cntr(sends, 1));
	EQ(errors(sends), 8);
	OK(ibv_set_comp_cntr(sends, 0));
	OK(ibv_set_err_comp_cntr(sends, 0));
	REFUSES(ibv_read_comp_cntr(sends, NULL), EINVAL);
	REFUSES(ibv_set_comp_cntr(NULL, 0), EINVAL);

	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	OK(attach(a.qp, sends, SEND));
	OK(attach(a.qp, bytes, READ | WRITE));
	REFUSES(attach(a.qp, received, WRITE | RECV), EBUSY);
	REFUSES(attach(a.qp, received, 64), EOPNOTSUPP);
	REFUSES(attach(a.qp, received, 0), EINVAL);
	REFUSES(attach(a.qp, NULL, RECV), EINVAL);
	OK(attach(b.qp, received, RECV));
	OK(attach(b.qp, remote, REMOTE_READ | REMOTE_WRITE));
	REFUSES(ibv_destroy_comp_cntr(sends), EBUSY);
	connect_ends(&a, &b);
	REFUSES(attach(a.qp, received, RECV), EINVAL);

	/* Not signaled: no completion, but counted. */
	for (int i = 0; i < 3; i++) {
		OK(post_recv(&b, i, 1000));
		OK(post_send(&a, i, 100 + i, 0));
	}
	one_sided(&a, &b, IBV_WR_RDMA_WRITE, 5000);
	one_sided(&a, &b, IBV_WR_RDMA_READ, 700);
	reaches(sends, 3);
	reaches(bytes, 5700);
	reaches(received, 303);
	reaches(remote, 2);
	struct ibv_wc wc;
	EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
	EQ(errors(sends) + errors(bytes) + errors(received) + errors(remote), 0);
	/* What is flushed has failed. */
	OK(post_recv(&b, 4, 1000));
	OK(post_recv(&b, 5, 1000));
	to_err(b.qp);
	EQ(errors(received), 2);
	to_err(a.qp);
	OK(post_send(&a, 6, 1, 0));
	EQ(errors(sends), 1);
	reaches(sends, 3);

	free_end(&a);
	OK(ibv_destroy_comp_cntr(sends));
	REFUSES(ibv_destroy_comp_cntr(sends), EINVAL);
	OK(ibv_destroy_comp_cntr(bytes));
	REFUSES(ibv_destroy_comp_cntr(remote), EBUSY);
	free_end(&b);
	OK(ibv_destroy_comp_cntr(remote));
	OK(ibv_destroy_comp_cntr(received));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
