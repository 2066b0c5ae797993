/* Parent domains and thread domains: whose they are, who is busy, what belongs together. */
#include "check.h"

/* A program's own allocator, which counts. */
struct account {
	struct ibv_pd *pd;
	int calls, live, refuse_from;
	size_t bytes;
	unsigned int types;
	bool by_default;
};

static void *own_alloc(struct ibv_pd *pd, void *context, size_t size, size_t alignment, uint64_t type)
{
	struct account *a = context;
	TRUE(pd == a->pd && size > 0 && size % alignment == 0 && type >> 32 == 0);
	if (++a->calls >= a->refuse_from)
		return NULL;
	a->types |= 1u << type;
	if (a->by_default)
		return IBV_ALLOCATOR_USE_DEFAULT;
	void *p = NULL;
	OK(posix_memalign(&p, alignment, size));
	memset(p, 0, size);
	a->live++;
	a->bytes += size;
	return p;
}

static void own_free(struct ibv_pd *pd, void *context, void *p, uint64_t type)
{
	struct account *a = context;
	TRUE(pd == a->pd && a->types & 1u << type);
	/* What is written after this line is found by the heap's checks. */
	a->live--;
	free(p);
}

static void allocators(struct ibv_context *ctx, bool by_default)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct account account = { .refuse_from = 1000000, .by_default = by_default };
	struct ibv_parent_domain_init_attr a = { .pd = pd, .alloc = own_alloc, .free = own_free, .pd_context = &account,
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT };
	account.pd = ibv_alloc_parent_domain(ctx, &a);
	TRUE(account.pd != NULL);
	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 64, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(account.pd, &srq_attr);
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = account.pd,
		.wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(ctx, &cq_attr);
	TRUE(srq != NULL && cq != NULL);
	struct end x = make_end(account.pd, IBV_QPT_RC), y = make_end(pd, IBV_QPT_RC);
	OK(ibv_destroy_qp(x.qp));
	OK(ibv_destroy_cq(x.cq));
	x.cq = ibv_cq_ex_to_cq(cq);
	x.qp = make_qp(account.pd, x.cq, IBV_QPT_RC, srq, 0);
	connect_ends(&x, &y);
	/* Of all three kinds, and they hold what was asked for. */
	EQ(account.types, 1u << 1 | 1u << 2 | 1u << 3);
	TRUE(by_default || account.bytes >= 16 * 32 + 64 * 2 * sizeof(struct ibv_sge) + 8 * 64);
	struct ibv_sge sge = { .addr = (uintptr_t)x.buf, .length = 64, .lkey = x.mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 5, .sg_list = &sge, .num_sge = 1 }, *bad;
	for (int i = 0; i < 200; i++) {
		OK(ibv_post_srq_recv(srq, &wr, &bad));
		OK(post_send(&y, 6, 64, IBV_SEND_SIGNALED | IBV_SEND_INLINE));
		EQ(poll_one(y.cq).status, IBV_WC_SUCCESS);
		EQ(poll_one(x.cq).wr_id, 5);
		OK(post_recv(&y, 7, 64));
		OK(post_send(&x, 8, 64, IBV_SEND_SIGNALED | IBV_SEND_INLINE));
		EQ(poll_one(x.cq).wr_id, 8);
		EQ(poll_one(y.cq).wr_id, 7);
	}
	OK(ibv_resize_cq(x.cq, 100));
	struct ibv_srq_attr more = { .max_wr = 100 };
	OK(ibv_modify_srq(srq, &more, IBV_SRQ_MAX_WR));
	/* No memory: no object, and nothing is kept. */
	int live = account.live;
	for (int n = 1; n <= 2; n++) {
		account.refuse_from = account.calls + n;
		IS_NULL(ibv_create_srq(account.pd, &srq_attr), ENOMEM);
		EQ(account.live, live);
	}
	IS_NULL(ibv_create_cq_ex(ctx, &cq_attr), ENOMEM);
	account.refuse_from = 1000000;
	/* All is given back when destroy returns. */
	free_end(&x), free_end(&y);
	OK(ibv_destroy_srq(srq));
	EQ(account.live, 0);
	OK(ibv_dealloc_pd(account.pd));
	OK(ibv_dealloc_pd(pd));
}

static void allocators_of_raw(struct ibv_context *ctx)
{
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct account account = { .refuse_from = 1000000 };
	struct ibv_parent_domain_init_attr a = { .pd = pd, .alloc = own_alloc, .free = own_free, .pd_context = &account,
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT };
	account.pd = ibv_alloc_parent_domain(ctx, &a);
	TRUE(account.pd != NULL);
	struct ibv_cq *cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	struct ibv_wq_init_attr wq_attr = { .wq_type = IBV_WQT_RQ, .max_wr = 64, .max_sge = 2, .pd = account.pd, .cq = cq };
	struct ibv_wq *wq = ibv_create_wq(ctx, &wq_attr);
	TRUE(wq != NULL);
	EQ(account.types, 1u << 4);
	TRUE(account.bytes >= 64 * 2 * sizeof(struct ibv_sge));
	account.refuse_from = account.calls + 2;
	IS_NULL(ibv_create_wq(ctx, &wq_attr), ENOMEM);
	account.refuse_from = 1000000;
	OK(ibv_destroy_wq(wq));
	EQ(account.live, 0);
	struct ibv_qp_init_attr qp_attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET,
		.cap = { .max_send_wr = 4, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 2 } };
	struct ibv_qp *qp = ibv_create_qp(account.pd, &qp_attr);
	/* For the privileged alone. */
	TRUE(qp != NULL || errno == EPERM);
	if (qp) {
		EQ(account.types, 1u << 4 | 1u << 1);
		TRUE(account.live > 0);
		account.refuse_from = account.calls + 1;
		IS_NULL(ibv_create_qp(account.pd, &qp_attr), ENOMEM);
		OK(ibv_destroy_qp(qp));
		EQ(account.live, 0);
	}
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(account.pd));
	OK(ibv_dealloc_pd(pd));
}

int main(void)
{
	struct ibv_context *ctx = open_device(), *other = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx), *plain = ibv_alloc_pd(ctx), *foreign = ibv_alloc_pd(other);
	struct ibv_td_init_attr td_attr = { 0 };
	struct ibv_td *td = ibv_alloc_td(ctx, &td_attr);
	TRUE(td != NULL && td->context == ctx);
	td_attr.comp_mask = 1;
	IS_NULL(ibv_alloc_td(ctx, &td_attr), EINVAL);
	IS_NULL(ibv_alloc_td(ctx, NULL), EINVAL);

	struct ibv_parent_domain_init_attr a = { .td = td };
	IS_NULL(ibv_alloc_parent_domain(ctx, &a), EINVAL);
	IS_NULL(ibv_alloc_parent_domain(ctx, NULL), EINVAL);
	a.pd = foreign;
	IS_NULL(ibv_alloc_parent_domain(ctx, &a), EINVAL);
	a.pd = pd, a.comp_mask = 8;
	IS_NULL(ibv_alloc_parent_domain(ctx, &a), EINVAL);
	a.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
	IS_NULL(ibv_alloc_parent_domain(ctx, &a), EINVAL);
	a.comp_mask = 0;
	struct ibv_pd *parent = ibv_alloc_parent_domain(ctx, &a);
	TRUE(parent != NULL && parent->context == ctx && parent != pd);
	/* One of a parent domain there is not. */
	a.pd = parent;
	IS_NULL(ibv_alloc_parent_domain(ctx, &a), EINVAL);

	REFUSES(ibv_dealloc_pd(pd), EBUSY);
	REFUSES(ibv_dealloc_td(td), EBUSY);

	/* Everything may be made on it, and belongs to its protection domain: key, queue pair and address handle fit. */
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 16, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD, .parent_domain = parent };
	struct ibv_cq_ex *cq = ibv_create_cq_ex(ctx, &cq_attr);
	TRUE(cq != NULL);
	struct end x = make_end(parent, IBV_QPT_RC), y = make_end(pd, IBV_QPT_RC), z = make_end(plain, IBV_QPT_RC);
	TRUE(x.qp->pd == parent && x.mr->pd == parent);
	connect_ends(&x, &y);
	struct ibv_mr *mr = x.mr;
	x.mr = y.mr;
	char *buf = x.buf;
	x.buf = y.buf + 4096;
	OK(post_recv(&y, 1, 64));
	OK(post_send(&x, 2, 64, IBV_SEND_SIGNALED));
	EQ(poll_one(x.cq).status, IBV_WC_SUCCESS);
	EQ(poll_one(y.cq).status, IBV_WC_SUCCESS);
	/* A key of another protection domain does not. */
	x.mr = z.mr, x.buf = z.buf;
	OK(post_send(&x, 3, 64, IBV_SEND_SIGNALED));
	EQ(poll_one(x.cq).status, IBV_WC_LOC_PROT_ERR);
	x.mr = mr, x.buf = buf;

	struct ibv_srq_init_attr srq_attr = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(parent, &srq_attr);
	TRUE(srq != NULL && srq->pd == parent);
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = 1, .grh.dgid = own_gid(ctx) };
	struct ibv_ah *ah = ibv_create_ah(parent, &ah_attr);
	TRUE(ah != NULL && ah->pd == parent);

	REFUSES(ibv_dealloc_pd(parent), EBUSY);
	free_end(&x), free_end(&y), free_end(&z);
	REFUSES(ibv_dealloc_pd(parent), EBUSY);
	OK(ibv_destroy_srq(srq));
	REFUSES(ibv_dealloc_pd(parent), EBUSY);
	OK(ibv_destroy_ah(ah));
	REFUSES(ibv_dealloc_pd(parent), EBUSY);
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
	OK(ibv_dealloc_pd(parent));
	REFUSES(ibv_dealloc_pd(parent), EINVAL);
	OK(ibv_dealloc_td(td));
	REFUSES(ibv_dealloc_td(td), EINVAL);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_dealloc_pd(plain));
	OK(ibv_dealloc_pd(foreign));
	OK(ibv_close_device(other));
	allocators(ctx, false);
	allocators(ctx, true);
	allocators_of_raw(ctx);
	OK(ibv_close_device(ctx));
	return 0;
}
