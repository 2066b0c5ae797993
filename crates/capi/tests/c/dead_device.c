/* Calls on a device that a script lets fail for good: commands answer EIO, what ends objects succeeds, and work is flushed. */
#include "check.h"

#include <unistd.h>

/* Newer than some headers, or private. */
int ibv_query_port_speed(struct ibv_context *context, uint32_t port_num, uint64_t *port_speed);
int ibv_query_gid_type(struct ibv_context *context, uint8_t port_num, unsigned int index, unsigned int *type);

/* Calls that ask the device for something. */
static void refuse_queries(struct ibv_context *ctx, struct ibv_qp *qp)
{
	struct ibv_device_attr device;
	struct ibv_device_attr_ex device_ex;
	struct ibv_port_attr port;
	struct ibv_gid_entry entry, entries[8];
	union ibv_gid gid;
	uint16_t pkey;
	REFUSES(ibv_query_device(ctx, &device), EIO);
	REFUSES(ibv_query_device_ex(ctx, NULL, &device_ex), EIO);
	REFUSES(ibv_query_port(ctx, 1, &port), EIO);
	MINUS_ONE(ibv_query_gid(ctx, 1, 0, &gid), EIO);
	REFUSES(ibv_query_gid_ex(ctx, 1, 0, &entry, 0), EIO);
	EQ(ibv_query_gid_table(ctx, entries, 8, 0), -EIO);
	MINUS_ONE(ibv_query_pkey(ctx, 1, 0, &pkey), EIO);
	MINUS_ONE(ibv_get_pkey_index(ctx, 1, 0xffff), EIO);
	uint64_t speed;
	unsigned int type;
	REFUSES(ibv_query_port_speed(ctx, 1, &speed), EIO);
	MINUS_ONE(ibv_query_gid_type(ctx, 1, 0, &type), EIO);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	REFUSES(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), EIO);
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1, .grh = { .dgid = { .raw = { [10] = 0xff, 0xff, 127, 0, 0, 1 } } } };
	uint8_t mac[6];
	EQ(ibv_resolve_eth_l2_from_gid(ctx, &ah, mac, NULL), -EIO);
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	struct ibv_grh grh = { 0 };
	MINUS_ONE(ibv_init_ah_from_wc(ctx, 1, &wc, &grh, &ah), EIO);
}

/* Calls that make something. */
static void refuse_new(struct ibv_context *ctx, struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_dm *dm)
{
	static char memory[64];
	IS_NULL(ibv_open_device(ctx->device), EIO);
	IS_NULL(ibv_import_device(dup(ctx->cmd_fd)), EIO);
	IS_NULL(ibv_alloc_pd(ctx), EIO);
	IS_NULL(ibv_import_pd(ctx, pd->handle), EIO);
	IS_NULL(ibv_reg_mr(pd, memory, sizeof memory, 0), EIO);
	IS_NULL(ibv_alloc_null_mr(pd), EIO);
	IS_NULL(ibv_alloc_mw(pd, IBV_MW_TYPE_1), EIO);
	IS_NULL(ibv_create_comp_channel(ctx), EIO);
	IS_NULL(ibv_create_cq(ctx, 1, NULL, NULL, 0), EIO);
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 1 };
	IS_NULL(ibv_create_cq_ex(ctx, &cq_attr), EIO);
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 1, .max_sge = 1 } };
	IS_NULL(ibv_create_srq(pd, &srq), EIO);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	IS_NULL(ibv_create_qp(pd, &init), EIO);
	struct ibv_ah_attr ah = { .is_global = 1, .port_num = 1, .grh = { .dgid = { .raw = { [10] = 0xff, 0xff, 127, 0, 0, 1 } } } };
	IS_NULL(ibv_create_ah(pd, &ah), EIO);
	struct ibv_alloc_dm_attr dm_attr = { .length = 64 };
	IS_NULL(ibv_alloc_dm(ctx, &dm_attr), EIO);
	IS_NULL(ibv_reg_dm_mr(pd, dm, 0, 64, IBV_ACCESS_ZERO_BASED), EIO);
	struct ibv_td_init_attr td = { 0 };
	IS_NULL(ibv_alloc_td(ctx, &td), EIO);
	struct ibv_parent_domain_init_attr parent = { .pd = pd };
	IS_NULL(ibv_alloc_parent_domain(ctx, &parent), EIO);
	struct ibv_xrcd_init_attr xrcd = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = 0100 };
	IS_NULL(ibv_open_xrcd(ctx, &xrcd), EIO);
	struct ibv_counters_init_attr counters = { 0 };
	IS_NULL(ibv_create_counters(ctx, &counters), EIO);
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC), ud = make_end(pd, IBV_QPT_UD);
	connect_ends(&a, &b);
	to_init(ud.qp), to_rtr(ud.qp, 0), to_rts(ud.qp);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	TRUE(srq != NULL);
	struct ibv_alloc_dm_attr dm_attr = { .length = 64 };
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &dm_attr);
	TRUE(dm != NULL);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	TRUE(mw != NULL);
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = own_gid(ctx), .hop_limit = 1 } };
	struct ibv_ah *ah = ibv_create_ah(pd, &ah_attr);
	TRUE(ah != NULL);
	struct ibv_counters_init_attr counters_attr = { 0 };
	struct ibv_counters *counters = ibv_create_counters(ctx, &counters_attr);
	TRUE(counters != NULL);
	union ibv_gid group = { .raw = { 0xff, 0x0e, [10] = 0xff, 0xff, 239, 1, 2, 3 } };
	OK(ibv_attach_mcast(ud.qp, &group, 0));
	OK(post_recv(&b, 7, 64));

	struct ibv_async_event event;
	OK(ibv_get_async_event(ctx, &event));
	EQ(event.event_type, IBV_EVENT_DEVICE_FATAL);
	ibv_ack_async_event(&event);
	/* The queue pairs follow. */
	struct ibv_wc wc = poll_one(b.cq);
	EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
	EQ(wc.wr_id, 7);

	refuse_queries(ctx, a.qp);
	refuse_new(ctx, pd, a.cq, dm);

	/* Changes. */
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	REFUSES(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), EIO);
	struct ibv_qp_rate_limit_attr rate = { .rate_limit = 1000 };
	REFUSES(ibv_modify_qp_rate_limit(a.qp, &rate), EIO);
	struct ibv_srq_attr srq_attr = { .srq_limit = 1 };
	REFUSES(ibv_modify_srq(srq, &srq_attr, IBV_SRQ_LIMIT), EIO);
	REFUSES(ibv_query_srq(srq, &srq_attr), EIO);
	REFUSES(ibv_resize_cq(a.cq, 64), EIO);
	struct ibv_modify_cq_attr moderate = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { 1, 1 } };
	REFUSES(ibv_modify_cq(a.cq, &moderate), EIO);
	errno = 0;
	EQ(ibv_rereg_mr(a.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0), IBV_REREG_MR_ERR_CMD);
	EQ(errno, EIO);
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 8, .lkey = a.mr->lkey };
	REFUSES(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EIO);
	group.raw[15] = 4;
	REFUSES(ibv_attach_mcast(ud.qp, &group, 0), EIO);
	uint64_t value;
	REFUSES(ibv_read_counters(counters, &value, 1, 0), EIO);

	/* Work: it is taken, and flushed. */
	OK(post_send(&a, 3, 8, IBV_SEND_SIGNALED));
	OK(post_recv(&a, 4, 8));
	for (uint64_t id = 3; id <= 4; id++) {
		wc = poll_one(a.cq);
		EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
		EQ(wc.wr_id, id);
	}
	EQ(ibv_poll_cq(a.cq, 1, &wc), 0);

	/* A queue pair in RESET takes no work, as ever. */
	attr.qp_state = IBV_QPS_RESET;
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE));
	EQ(post_send(&a, 5, 8, IBV_SEND_SIGNALED), EINVAL);
	EQ(post_recv(&a, 6, 8), EINVAL);
	EQ(ibv_poll_cq(a.cq, 1, &wc), 0);

	/* What needs no device. */
	struct ibv_counter_attach_attr attach = { .counter_desc = IBV_COUNTER_PACKETS };
	OK(ibv_attach_counters_point_flow(counters, &attach, NULL));
	EQ(ibv_query_qp_data_in_order(a.qp, IBV_WR_SEND, 0), 0);

	/* The ends. */
	attr.qp_state = IBV_QPS_ERR;
	OK(ibv_modify_qp(a.qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RESET;
	OK(ibv_modify_qp(b.qp, &attr, IBV_QP_STATE));
	group.raw[15] = 3;
	OK(ibv_detach_mcast(ud.qp, &group, 0));
	OK(ibv_destroy_counters(counters));
	OK(ibv_destroy_ah(ah));
	OK(ibv_dealloc_mw(mw));
	OK(ibv_free_dm(dm));
	OK(ibv_destroy_srq(srq));
	free_end(&a), free_end(&b), free_end(&ud);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
