/* Parent domains and thread domains: whose they are, who is busy, what belongs together. */
#include "check.h"

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
	OK(ibv_close_device(ctx));
	return 0;
}
