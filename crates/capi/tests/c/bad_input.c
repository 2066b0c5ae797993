/*
 * "Bad input, everywhere", for the calls that handles.c does not have: nothing, an object that was never made, and one that
 * is gone, in every place where a call takes a pointer. The inlines of verbs.h read the object that they are given before
 * the library sees it: what stands behind them is called as they call it.
 */
#include "check.h"
#include <stdint.h>

int ibv_read_sysfs_file(const char *, const char *, char *, size_t);

static char strange[4096] __attribute__((aligned(64)));
#define STRANGE ((void *)strange)

/* The next call is with NULL, then with memory that is no object. */
#define BOTH(check, call, error)                                                    \
	do {                                                                        \
		void *bad = NULL;                                                   \
		check(call, error);                                                 \
		bad = STRANGE;                                                      \
		check(call, error);                                                 \
	} while (0)

static void rest_of_the_exported(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct ibv_gid_entry entry;
	union ibv_gid gid = own_gid(ctx);
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1, .grh.dgid = gid };
	uint8_t mac[6], buf[40] = { 0 };
	uint16_t vlan;
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	struct ibv_ece ece = { 0 };

	/* errno comes back as a negative number here. */
	EQ(_ibv_query_gid_ex(NULL, 1, 0, &entry, 0, sizeof entry), EINVAL);
	EQ(_ibv_query_gid_ex(ctx, 1, 0, NULL, 0, sizeof entry), EINVAL);
	EQ(_ibv_query_gid_ex(ctx, 0, 0, &entry, 0, sizeof entry), EINVAL);
	EQ(_ibv_query_gid_ex(ctx, 2, 0, &entry, 0, sizeof entry), EINVAL);
	EQ(_ibv_query_gid_ex(ctx, 1, 1 << 20, &entry, 0, sizeof entry), EINVAL);
	EQ(_ibv_query_gid_ex(ctx, 1, 0, &entry, 1, sizeof entry), EINVAL);
	EQ(_ibv_query_gid_table(NULL, &entry, 1, 0, sizeof entry), -EINVAL);
	EQ(_ibv_query_gid_table(ctx, NULL, 1, 0, sizeof entry), -EINVAL);
	EQ(_ibv_query_gid_table(ctx, &entry, 1, 1, sizeof entry), -EINVAL);
	EQ(_ibv_query_gid_table(ctx, &entry, 0, 0, sizeof entry), -EINVAL);

	MINUS_ONE(ibv_query_gid(ctx, 1, -1, &gid), EINVAL);
	MINUS_ONE(ibv_query_gid(ctx, 1, 1 << 20, &gid), EINVAL);
	MINUS_ONE(ibv_query_gid(ctx, 0, 0, &gid), EINVAL);
	MINUS_ONE(ibv_query_gid(ctx, 1, 0, NULL), EINVAL);
	MINUS_ONE(ibv_query_pkey(ctx, 1, -1, &(__be16){ 0 }), EINVAL);
	MINUS_ONE(ibv_query_pkey(ctx, 1, 1 << 20, &(__be16){ 0 }), EINVAL);
	MINUS_ONE(ibv_query_pkey(ctx, 1, 0, NULL), EINVAL);
	EQ(ibv_get_pkey_index(NULL, 1, htobe16(0xffff)), -1);
	EQ(ibv_get_pkey_index(ctx, 7, htobe16(0xffff)), -1);
	EQ(ibv_get_pkey_index(ctx, 1, htobe16(0x1234)), -1);
	REFUSES(ibv_query_device(ctx, NULL), EINVAL);
	EQ(ibv_get_device_index(NULL), -1);

	BOTH(REFUSES, ibv_attach_mcast(bad, &gid, 0), EINVAL);
	BOTH(REFUSES, ibv_detach_mcast(bad, &gid, 0), EINVAL);
	BOTH(IS_NULL, ibv_create_ah(bad, &ah), EINVAL);
	BOTH(REFUSES, ibv_query_ece(bad, &ece), EINVAL);
	BOTH(REFUSES, ibv_set_ece(bad, &ece), EINVAL);
	BOTH(EQ, ibv_query_qp_data_in_order(bad, IBV_WR_SEND, 0), 0);
	BOTH(IS_NULL, ibv_reg_dmabuf_mr(bad, 0, 64, 0, 0, 0), EINVAL);
	IS_NULL(ibv_reg_dmabuf_mr(pd, 0, 64, 0, -1, 0), EBADF);
	BOTH(IS_NULL, (ibv_reg_mr_iova)(bad, buf, sizeof buf, 0, 0), EINVAL);
	BOTH(IS_NULL, (ibv_reg_mr_iova2)(bad, buf, sizeof buf, 0, 0), EINVAL);
	IS_NULL((ibv_reg_mr)(pd, NULL, 64, IBV_ACCESS_LOCAL_WRITE), EFAULT);
	IS_NULL((ibv_reg_mr)(pd, buf, SIZE_MAX, 0), EINVAL);
	IS_NULL((ibv_reg_mr)(pd, (void *)(UINTPTR_MAX - 10), 4096, 0), EINVAL);
	IS_NULL((ibv_reg_mr_iova2)(pd, buf, sizeof buf, UINT64_MAX - 1, 0), EINVAL);

	BOTH(IS_NULL, ibv_import_mr(bad, 0), EINVAL);
	BOTH(IS_NULL, ibv_import_pd(bad, 0), EINVAL);
	BOTH(IS_NULL, ibv_import_dm(bad, 0), EINVAL);
	ibv_unimport_mr(NULL), ibv_unimport_pd(NULL), ibv_unimport_dm(NULL);
	ibv_unimport_mr(STRANGE), ibv_unimport_pd(STRANGE), ibv_unimport_dm(STRANGE);
	IS_NULL(ibv_import_device(-1), EBADF);
	IS_NULL(ibv_import_device(0x7fffffff), EBADF);

	MINUS_ONE(ibv_init_ah_from_wc(NULL, 1, &wc, (struct ibv_grh *)buf, &ah), EINVAL);
	MINUS_ONE(ibv_init_ah_from_wc(ctx, 9, &wc, (struct ibv_grh *)buf, &ah), EINVAL);
	MINUS_ONE(ibv_init_ah_from_wc(ctx, 1, NULL, (struct ibv_grh *)buf, &ah), EINVAL);
	MINUS_ONE(ibv_init_ah_from_wc(ctx, 1, &wc, NULL, &ah), EINVAL);
	MINUS_ONE(ibv_init_ah_from_wc(ctx, 1, &wc, (struct ibv_grh *)buf, NULL), EINVAL);
	IS_NULL(ibv_create_ah_from_wc(pd, NULL, (struct ibv_grh *)buf, 1), EINVAL);
	IS_NULL(ibv_create_ah_from_wc(pd, &wc, NULL, 1), EINVAL);
	IS_NULL(ibv_create_ah_from_wc(pd, &wc, (struct ibv_grh *)buf, 1), EINVAL);
	TRUE(ibv_resolve_eth_l2_from_gid(NULL, &ah, mac, &vlan) != 0);
	TRUE(ibv_resolve_eth_l2_from_gid(ctx, NULL, mac, &vlan) != 0);
	TRUE(ibv_resolve_eth_l2_from_gid(ctx, &ah, NULL, &vlan) != 0);

	char name[8];
	EQ(ibv_read_sysfs_file(NULL, "x", name, sizeof name), -1);
	EQ(ibv_read_sysfs_file("/sys", NULL, name, sizeof name), -1);
	EQ(ibv_read_sysfs_file("/sys", "nothing", NULL, sizeof name), -1);
	TRUE(ibv_wc_status_str(-1) && ibv_wc_status_str(12345) && ibv_node_type_str(-7) && ibv_node_type_str(99));
	TRUE(ibv_port_state_str(-1) && ibv_port_state_str(99) && ibv_event_type_str(-1) && ibv_event_type_str(99));
	EQ(ibv_rate_to_mult(-1), -1);
	EQ(ibv_rate_to_mult(99), -1);
	EQ(ibv_rate_to_mbps(-1), -1);
	EQ(ibv_rate_to_mbps(99), -1);
	EQ(mult_to_ibv_rate(-5), IBV_RATE_MAX);
	EQ(mbps_to_ibv_rate(-5), IBV_RATE_MAX);
	ibv_free_device_list(NULL);
}

static void extended(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct verbs_context *v = verbs_get_ctx(ctx);
	struct ibv_port_attr port;
	struct ibv_device_attr_ex device;
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	struct ibv_sge sge = { 0 };
	uint64_t value;
	uint32_t number;

	TRUE(v != NULL);
	REFUSES(v->query_port(NULL, 1, &port, sizeof port), EINVAL);
	REFUSES(v->query_port(ctx, 1, NULL, sizeof port), EINVAL);
	REFUSES(v->query_port(ctx, 0, &port, sizeof port), EINVAL);
	REFUSES(v->query_port(ctx, 255, &port, sizeof port), EINVAL);
	REFUSES(v->query_device_ex(NULL, NULL, &device, sizeof device), EINVAL);
	REFUSES(v->query_device_ex(ctx, NULL, NULL, sizeof device), EINVAL);
	REFUSES(v->query_rt_values(ctx, NULL), EINVAL);
	REFUSES(v->query_rt_values(NULL, &values), EINVAL);

	BOTH(REFUSES, v->advise_mr(bad, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EINVAL);
	REFUSES(v->advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, NULL, 1), EINVAL);
	REFUSES(v->advise_mr(pd, 77, 0, &sge, 1), EOPNOTSUPP);
	BOTH(IS_NULL, v->alloc_null_mr(bad), EINVAL);

	BOTH(REFUSES, v->read_counters(bad, &value, 1, 0), EINVAL);
	BOTH(REFUSES, v->attach_counters_point_flow(bad, NULL, NULL), EINVAL);
	BOTH(REFUSES, v->destroy_counters(bad), EINVAL);
	IS_NULL(v->create_counters(NULL, NULL), EINVAL);
	IS_NULL(v->create_counters(ctx, NULL), EINVAL);

	struct ibv_alloc_dm_attr dm = { .length = 0 };
	IS_NULL(v->alloc_dm(NULL, &dm), EINVAL);
	IS_NULL(v->alloc_dm(ctx, NULL), EINVAL);
	IS_NULL(v->alloc_dm(ctx, &dm), EINVAL);
	dm.length = SIZE_MAX;
	IS_NULL(v->alloc_dm(ctx, &dm), ENOMEM);
	dm.length = 64, dm.log_align_req = 63;
	TRUE(v->alloc_dm(ctx, &dm) == NULL);
	dm.log_align_req = 0, dm.comp_mask = 1 << 31;
	TRUE(v->alloc_dm(ctx, &dm) == NULL);
	BOTH(REFUSES, v->free_dm(bad), EINVAL);
	BOTH(IS_NULL, v->reg_dm_mr(pd, bad, 0, 4, IBV_ACCESS_ZERO_BASED), EINVAL);

	BOTH(REFUSES, v->modify_qp_rate_limit(bad, &(struct ibv_qp_rate_limit_attr){ 0 }), EINVAL);
	IS_NULL(v->alloc_parent_domain(NULL, NULL), EINVAL);
	IS_NULL(v->alloc_parent_domain(ctx, NULL), EINVAL);
	struct ibv_parent_domain_init_attr of = { .pd = NULL };
	IS_NULL(v->alloc_parent_domain(ctx, &of), EINVAL);
	of.pd = STRANGE;
	IS_NULL(v->alloc_parent_domain(ctx, &of), EINVAL);
	of.pd = pd, of.td = STRANGE;
	IS_NULL(v->alloc_parent_domain(ctx, &of), EINVAL);
	of.td = NULL, of.comp_mask = 1 << 30;
	TRUE(v->alloc_parent_domain(ctx, &of) == NULL);
	IS_NULL(v->alloc_td(NULL, NULL), EINVAL);
	IS_NULL(v->alloc_td(ctx, NULL), EINVAL);
	BOTH(REFUSES, v->dealloc_td(bad), EINVAL);

	IS_NULL(v->create_cq_ex(NULL, NULL), EINVAL);
	IS_NULL(v->create_cq_ex(ctx, NULL), EINVAL);
	BOTH(REFUSES, v->modify_cq(bad, &(struct ibv_modify_cq_attr){ 0 }), EINVAL);
	IS_NULL(v->create_srq_ex(NULL, NULL), EINVAL);
	IS_NULL(v->create_srq_ex(ctx, NULL), EINVAL);
	BOTH(REFUSES, v->get_srq_num(bad, &number), EINVAL);
	struct ibv_ops_wr *bad_op;
	REFUSES(v->post_srq_ops(NULL, NULL, &bad_op), EINVAL);
	IS_NULL(v->open_xrcd(NULL, NULL), EINVAL);
	IS_NULL(v->open_xrcd(ctx, NULL), EINVAL);
	BOTH(REFUSES, v->close_xrcd(bad), EINVAL);
	IS_NULL(v->create_qp_ex(NULL, NULL), EINVAL);
	IS_NULL(v->create_qp_ex(ctx, NULL), EINVAL);
	IS_NULL(v->open_qp(NULL, NULL), EINVAL);
	IS_NULL(v->open_qp(ctx, NULL), EINVAL);

	IS_NULL(v->create_wq(NULL, NULL), EINVAL);
	IS_NULL(v->create_wq(ctx, NULL), EINVAL);
	BOTH(REFUSES, v->modify_wq(bad, &(struct ibv_wq_attr){ 0 }), EINVAL);
	BOTH(REFUSES, v->destroy_wq(bad), EINVAL);
	IS_NULL(v->create_rwq_ind_table(NULL, NULL), EINVAL);
	IS_NULL(v->create_rwq_ind_table(ctx, NULL), EINVAL);
	struct ibv_rwq_ind_table_init_attr table = { .log_ind_tbl_size = 1 };
	IS_NULL(v->create_rwq_ind_table(ctx, &table), EINVAL);
	table.log_ind_tbl_size = 40;
	table.ind_tbl = (struct ibv_wq *[]){ STRANGE, STRANGE };
	IS_NULL(v->create_rwq_ind_table(ctx, &table), EINVAL);
	table.log_ind_tbl_size = 1;
	IS_NULL(v->create_rwq_ind_table(ctx, &table), EINVAL);
	BOTH(REFUSES, v->destroy_rwq_ind_table(bad), EINVAL);
	BOTH(IS_NULL, v->ibv_create_flow(bad, NULL), EINVAL);
	BOTH(REFUSES, v->ibv_destroy_flow(bad), EINVAL);
}

static void data_path(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct ibv_context_ops *ops = &ctx->ops;
	struct ibv_wc wc;
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad_send;
	struct ibv_recv_wr recv = { 0 }, *bad_recv;
	struct ibv_mw_bind bind = { 0 };

	/* The data path looks nothing up: no more than NULL can be known there. */
	MINUS_ONE(ops->poll_cq(NULL, 1, &wc), EINVAL);
	REFUSES(ops->req_notify_cq(NULL, 0), EINVAL);
	REFUSES(ops->post_send(NULL, &send, &bad_send), EINVAL);
	REFUSES(ops->post_recv(NULL, &recv, &bad_recv), EINVAL);
	REFUSES(ops->post_srq_recv(NULL, &recv, &bad_recv), EINVAL);
	BOTH(IS_NULL, ops->alloc_mw(bad, IBV_MW_TYPE_1), EINVAL);
	IS_NULL(ops->alloc_mw(pd, 0), EINVAL);
	IS_NULL(ops->alloc_mw(pd, 3), EINVAL);
	BOTH(REFUSES, ops->dealloc_mw(bad), EINVAL);

	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	TRUE(mw != NULL);
	connect_ends(&a, &b);
	REFUSES(ops->bind_mw(NULL, mw, &bind), EINVAL);
	BOTH(REFUSES, ops->bind_mw(a.qp, bad, &bind), EINVAL);
	REFUSES(ops->bind_mw(a.qp, mw, NULL), EINVAL);
	bind.bind_info.length = 16, bind.bind_info.mr = STRANGE;
	REFUSES(ops->bind_mw(a.qp, mw, &bind), EINVAL);
	/* Nothing to post is no error. */
	OK(ops->post_send(a.qp, NULL, &bad_send));
	OK(ops->post_recv(a.qp, NULL, &bad_recv));
	recv.num_sge = 1;
	REFUSES(ops->post_recv(a.qp, &recv, &bad_recv), EINVAL);
	TRUE(bad_recv == &recv);
	recv.num_sge = -1;
	REFUSES(ops->post_recv(a.qp, &recv, NULL), EINVAL);

	free_end(&b);
	OK(ibv_dealloc_mw(mw));
	REFUSES(ops->dealloc_mw(mw), EINVAL);
	free_end(&a);
}

/* Objects are found by what they are, too: one of another kind in the place of each. */
static void confused(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct end e = make_end(pd, IBV_QPT_RC);
	struct ibv_qp_init_attr qi = { .send_cq = (void *)e.qp, .recv_cq = e.cq, .qp_type = IBV_QPT_RC };
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.send_cq = e.cq, qi.recv_cq = NULL;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	qi.recv_cq = e.cq, qi.srq = (void *)e.cq;
	IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
	IS_NULL(ibv_create_cq(ctx, 4, NULL, STRANGE, 0), EINVAL);
	IS_NULL(ibv_create_qp((void *)ctx, &qi), EINVAL);
	IS_NULL(ibv_alloc_pd((void *)pd), EINVAL);
	IS_NULL(ibv_create_ah(pd, NULL), EINVAL);
	IS_NULL(ibv_create_srq(pd, NULL), EINVAL);
	IS_NULL(ibv_create_qp(pd, NULL), EINVAL);
	REFUSES(ibv_modify_srq((void *)e.cq, &(struct ibv_srq_attr){ 0 }, 0), EINVAL);
	REFUSES(ibv_query_qp(e.qp, NULL, 0, NULL), EINVAL);
	struct ibv_cq *cq = NULL;
	void *cookie;
	MINUS_ONE(ibv_get_cq_event(STRANGE, &cq, &cookie), EINVAL);
	ibv_ack_cq_events((void *)e.qp, 1);
	struct ibv_async_event never = { .event_type = IBV_EVENT_QP_FATAL, .element.qp = STRANGE };
	ibv_ack_async_event(&never);
	never.event_type = 99;
	ibv_ack_async_event(&never);
	REFUSES(ibv_resize_cq((void *)e.qp, 4), EINVAL);
	REFUSES(ibv_resize_cq(e.cq, -1), EINVAL);
	REFUSES(ibv_resize_cq(e.cq, 0x7fffffff), EINVAL);

	/* More than the device has. */
	struct ibv_device_attr attr;
	OK(ibv_query_device(ctx, &attr));
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = (uint32_t)attr.max_srq_wr + 1, .max_sge = 1 } };
	IS_NULL(ibv_create_srq(pd, &srq), EINVAL);
	srq.attr.max_wr = 4, srq.attr.max_sge = (uint32_t)attr.max_srq_sge + 1;
	IS_NULL(ibv_create_srq(pd, &srq), EINVAL);
	IS_NULL(ibv_create_cq(ctx, attr.max_cqe + 1, NULL, NULL, 0), EINVAL);
	qi.srq = NULL;
	uint32_t *caps[] = { &qi.cap.max_send_wr, &qi.cap.max_recv_wr, &qi.cap.max_send_sge, &qi.cap.max_recv_sge,
			     &qi.cap.max_inline_data };
	for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
		*caps[i] = UINT32_MAX;
		IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
		*caps[i] = i < 4 ? (uint32_t)(i < 2 ? attr.max_qp_wr : attr.max_sge) + 1 : 1 << 20;
		IS_NULL(ibv_create_qp(pd, &qi), EINVAL);
		*caps[i] = 0;
	}
	free_end(&e);
}

int main(void)
{
	memset(strange, 0x5a, sizeof strange);
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	rest_of_the_exported(ctx, pd);
	extended(ctx, pd);
	data_path(ctx, pd);
	confused(ctx, pd);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
