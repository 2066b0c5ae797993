/* Work queues, indirection tables and the queue pairs that spread frames over them: S4.1 sizes, S4.2 states and flushing, S4.3 flags, S4.4
 * spreading. */
#include "check.h"

#include <poll.h>
#include <unistd.h>

static const uint8_t BOB[6] = { 2, 0, 0, 0, 0, 0xb };

static struct ibv_wq *make_wq(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t flags)
{
	struct ibv_wq_init_attr init = { .wq_type = IBV_WQT_RQ, .max_wr = 16, .max_sge = 2, .pd = pd, .cq = cq,
					 .comp_mask = IBV_WQ_INIT_ATTR_FLAGS, .create_flags = flags };
	struct ibv_wq *wq = ibv_create_wq(pd->context, &init);
	if (wq)
		TRUE(init.max_wr >= 16 && init.max_sge >= 2);
	return wq;
}

static int to_state(struct ibv_wq *wq, enum ibv_wq_state state)
{
	struct ibv_wq_attr attr = { .attr_mask = IBV_WQ_ATTR_STATE, .wq_state = state };
	return ibv_modify_wq(wq, &attr);
}

static int post(struct ibv_wq *wq, struct ibv_mr *mr)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr, .length = 2048, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = wq->wq_num, .sg_list = &sge, .num_sge = 1 }, *bad = NULL;
	int ret = ibv_post_wq_recv(wq, &wr, &bad);
	TRUE(ret == 0 || bad == &wr);
	return ret;
}

static void refuse_wqs(struct ibv_context *ctx, struct ibv_pd *pd, struct ibv_cq *cq)
{
	IS_NULL(make_wq(pd, cq, IBV_WQ_FLAGS_DELAY_DROP), EOPNOTSUPP);
	IS_NULL(make_wq(pd, cq, IBV_WQ_FLAGS_PCI_WRITE_END_PADDING), EOPNOTSUPP);
	IS_NULL(make_wq(pd, cq, IBV_WQ_FLAGS_RESERVED), EINVAL);
	IS_NULL(make_wq(pd, NULL, 0), EINVAL);
	struct ibv_wq_init_attr init = { .wq_type = 1, .max_wr = 1, .max_sge = 1, .pd = pd, .cq = cq };
	IS_NULL(ibv_create_wq(ctx, &init), EINVAL);
	init.wq_type = IBV_WQT_RQ;
	init.max_wr = 0;
	IS_NULL(ibv_create_wq(ctx, &init), EINVAL);
	init.max_wr = 1 << 30;
	IS_NULL(ibv_create_wq(ctx, &init), EINVAL);
	init.max_wr = 1;
	init.max_sge = 1000;
	IS_NULL(ibv_create_wq(ctx, &init), EINVAL);
	init.max_sge = 1;
	init.comp_mask = 2;
	IS_NULL(ibv_create_wq(ctx, &init), EINVAL);
}

/* A receive without an element could take no frame. */
static void no_sges(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_wq_init_attr init = { .wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 0, .pd = pd, .cq = cq };
	struct ibv_wq *wq = ibv_create_wq(pd->context, &init);
	TRUE(wq != NULL);
	TRUE(init.max_wr >= 1 && init.max_sge >= 1);
	OK(ibv_destroy_wq(wq));
}

static void states(struct ibv_wq *wq, struct ibv_cq *cq, struct ibv_mr *mr)
{
	EQ(wq->state, IBV_WQS_RESET);
	EQ(post(wq, mr), EINVAL);
	REFUSES(to_state(wq, IBV_WQS_UNKNOWN), EINVAL);
	struct ibv_wq_attr attr = { 0 };
	REFUSES(ibv_modify_wq(wq, &attr), EINVAL);
	attr = (struct ibv_wq_attr){ .attr_mask = IBV_WQ_ATTR_STATE | IBV_WQ_ATTR_CURR_STATE, .wq_state = IBV_WQS_RDY, .curr_wq_state = IBV_WQS_ERR };
	REFUSES(ibv_modify_wq(wq, &attr), EINVAL);
	attr.curr_wq_state = IBV_WQS_RESET;
	OK(ibv_modify_wq(wq, &attr));
	EQ(wq->state, IBV_WQS_RDY);
	attr = (struct ibv_wq_attr){ .attr_mask = IBV_WQ_ATTR_FLAGS, .flags = IBV_WQ_FLAGS_CVLAN_STRIPPING, .flags_mask = IBV_WQ_FLAGS_CVLAN_STRIPPING };
	OK(ibv_modify_wq(wq, &attr));
	attr.flags_mask = attr.flags = IBV_WQ_FLAGS_DELAY_DROP;
	REFUSES(ibv_modify_wq(wq, &attr), EOPNOTSUPP);
	for (int i = 0; i < 16; i++)
		OK(post(wq, mr));
	EQ(post(wq, mr), ENOMEM);
	OK(to_state(wq, IBV_WQS_ERR));
	for (int i = 0; i < 16; i++) {
		struct ibv_wc wc = poll_one(cq);
		EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
		EQ(wc.wr_id, wq->wq_num);
	}
	OK(post(wq, mr));
	EQ(poll_one(cq).status, IBV_WC_WR_FLUSH_ERR);
	REFUSES(to_state(wq, IBV_WQS_RDY), EINVAL);
	OK(to_state(wq, IBV_WQS_RESET));
	OK(to_state(wq, IBV_WQS_RDY));
}

enum { FRAME = 42 };

static void send_frame(struct ibv_qp *sender, struct ibv_cq *scq, struct ibv_mr *mr, int i)
{
	uint8_t *frame = (uint8_t *)mr->addr + 4096;
	memset(frame, 0, FRAME);
	memcpy(frame, BOB, 6);
	memcpy(frame + 12, "\x08\x00\x45\x00\x00\x1c\x00\x01\x00\x00\x40\x11", 12);
	frame[28] = i;
	frame[29] = i * 7;
	struct ibv_sge sge = { .addr = (uintptr_t)frame, .length = FRAME, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
	OK(ibv_post_send(sender, &wr, &bad));
	EQ(poll_one(scq).status, IBV_WC_SUCCESS);
}

static struct ibv_flow *to_bob(struct ibv_qp *qp)
{
	struct { struct ibv_flow_attr attr; struct ibv_flow_spec_eth eth; } rule = {
		.attr = { .num_of_specs = 1, .port = 1, .size = sizeof rule },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof rule.eth },
	};
	memcpy(rule.eth.val.dst_mac, BOB, 6);
	memset(rule.eth.mask.dst_mac, 0xff, 6);
	struct ibv_flow *flow = ibv_create_flow(qp, &rule.attr);
	TRUE(flow != NULL);
	return flow;
}

/* Frames overrun the CQ of a work queue, or the flushing after a frame for which there is no memory does: its event, then that of the
 * work queue, each once. The queue is in ERR. */
static void overrun(struct ibv_qp_init_attr_ex *spread, struct ibv_cq *scq, struct ibv_mr *mr, struct ibv_qp *sender, int no_memory)
{
	struct ibv_context *ctx = mr->context;
	struct ibv_cq *small = ibv_create_cq(ctx, 1, NULL, NULL, 0);
	TRUE(small != NULL);
	struct ibv_wq *wq = make_wq(mr->pd, small, 0);
	TRUE(wq != NULL);
	OK(to_state(wq, IBV_WQS_RDY));
	struct ibv_mr nowhere = *mr;
	nowhere.lkey ^= 0x5a00;
	for (int i = 0; i < 3; i++)
		OK(post(wq, no_memory ? &nowhere : mr));
	struct ibv_rwq_ind_table_init_attr ti = { .log_ind_tbl_size = 0, .ind_tbl = &wq };
	struct ibv_rwq_ind_table *table = ibv_create_rwq_ind_table(ctx, &ti);
	TRUE(table != NULL);
	struct ibv_qp_init_attr_ex init = *spread;
	init.rwq_ind_tbl = table;
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	TRUE(qp != NULL);
	struct ibv_flow *flow = to_bob(qp);
	for (int i = 0; i < 2; i++)
		send_frame(sender, scq, mr, i);

	struct ibv_async_event event;
	OK(ibv_get_async_event(ctx, &event));
	EQ(event.event_type, IBV_EVENT_CQ_ERR);
	TRUE(event.element.cq == small);
	ibv_ack_async_event(&event);
	OK(ibv_get_async_event(ctx, &event));
	EQ(event.event_type, IBV_EVENT_WQ_FATAL);
	TRUE(event.element.wq == wq);
	ibv_ack_async_event(&event);
	struct pollfd more = { .fd = ctx->async_fd, .events = POLLIN };
	EQ(poll(&more, 1, 100), 0);
	REFUSES(to_state(wq, IBV_WQS_RDY), EINVAL);
	OK(to_state(wq, IBV_WQS_RESET));

	OK(ibv_destroy_flow(flow));
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_rwq_ind_table(table));
	OK(ibv_destroy_wq(wq));
	OK(ibv_destroy_cq(small));
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq *cq = ibv_create_cq(ctx, 64, NULL, NULL, 0), *scq = ibv_create_cq(ctx, 64, NULL, NULL, 0);
	TRUE(pd && cq && scq);
	struct ibv_device_attr_ex dev = { 0 };
	OK(ibv_query_device_ex(ctx, NULL, &dev));
	EQ(dev.rss_caps.supported_qpts, 1 << IBV_QPT_RAW_PACKET);
	EQ(dev.rss_caps.rx_hash_function, IBV_RX_HASH_FUNC_TOEPLITZ);
	TRUE(dev.max_wq_type_rq > 0 && dev.rss_caps.max_rwq_indirection_table_size >= 128);

	refuse_wqs(ctx, pd, cq);
	no_sges(pd, cq);
	char *buf = calloc(1, BUF);
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, BUF, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_wq *wqs[4];
	for (int i = 0; i < 4; i++) {
		wqs[i] = make_wq(pd, cq, 0);
		TRUE(wqs[i] != NULL);
	}
	REFUSES(ibv_dealloc_pd(pd), EBUSY);
	REFUSES(ibv_destroy_cq(cq), EBUSY);
	states(wqs[0], cq, mr);
	for (int i = 1; i < 4; i++)
		OK(to_state(wqs[i], IBV_WQS_RDY));

	struct ibv_rwq_ind_table_init_attr ti = { .log_ind_tbl_size = 20, .ind_tbl = wqs };
	IS_NULL(ibv_create_rwq_ind_table(ctx, &ti), EINVAL);
	ti.log_ind_tbl_size = 2;
	ti.comp_mask = 1;
	IS_NULL(ibv_create_rwq_ind_table(ctx, &ti), EINVAL);
	ti.comp_mask = 0;
	struct ibv_wq *stale[4] = { wqs[0], wqs[1], wqs[2], NULL };
	ti.ind_tbl = stale;
	IS_NULL(ibv_create_rwq_ind_table(ctx, &ti), EINVAL);
	ti.ind_tbl = wqs;
	struct ibv_rwq_ind_table *table = ibv_create_rwq_ind_table(ctx, &ti);
	TRUE(table != NULL);
	/* S4.5 */
	REFUSES(ibv_destroy_wq(wqs[3]), EBUSY);

	uint8_t key[40];
	for (int i = 0; i < 40; i++)
		key[i] = i * 37 ^ 0x6d;
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RAW_PACKET, .pd = pd, .rwq_ind_tbl = table,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH,
		.rx_hash_conf = { .rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ, .rx_hash_key_len = 39, .rx_hash_key = key,
				  .rx_hash_fields_mask = IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4 },
	};
	if (geteuid() != 0) {
		fprintf(stderr, "SKIPPED but for the refusal: not root\n");
		init.rx_hash_conf.rx_hash_key_len = 40;
		IS_NULL(ibv_create_qp_ex(ctx, &init), EPERM);
		return 0;
	}
	IS_NULL(ibv_create_qp_ex(ctx, &init), EINVAL);
	init.rx_hash_conf.rx_hash_key_len = 40;
	init.rx_hash_conf.rx_hash_function = 2;
	IS_NULL(ibv_create_qp_ex(ctx, &init), EOPNOTSUPP);
	init.rx_hash_conf.rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ;
	init.rx_hash_conf.rx_hash_fields_mask = 1 << 9;
	IS_NULL(ibv_create_qp_ex(ctx, &init), EINVAL);
	init.rx_hash_conf.rx_hash_fields_mask = IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4;
	init.comp_mask &= ~IBV_QP_INIT_ATTR_RX_HASH;
	IS_NULL(ibv_create_qp_ex(ctx, &init), EINVAL);
	init.comp_mask |= IBV_QP_INIT_ATTR_RX_HASH;
	init.qp_type = IBV_QPT_UD;
	IS_NULL(ibv_create_qp_ex(ctx, &init), EOPNOTSUPP);
	init.qp_type = IBV_QPT_RAW_PACKET;
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	TRUE(qp != NULL);
	REFUSES(ibv_destroy_rwq_ind_table(table), EBUSY);
	struct ibv_qp_attr to_init_attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	REFUSES(ibv_modify_qp(qp, &to_init_attr, IBV_QP_STATE | IBV_QP_PORT), EOPNOTSUPP);

	struct ibv_qp *sender = make_qp(pd, scq, IBV_QPT_RAW_PACKET, NULL, 1);
	for (int s = IBV_QPS_INIT; s <= IBV_QPS_RTS; s++) {
		struct ibv_qp_attr a = { .qp_state = s, .port_num = 1 };
		OK(ibv_modify_qp(sender, &a, IBV_QP_STATE | (s == IBV_QPS_INIT ? IBV_QP_PORT : 0)));
	}
	struct ibv_flow *flow = to_bob(qp);

	for (int i = 0; i < 4; i++)
		for (int k = 0; k < 16; k++)
			OK(post(wqs[i], mr));
	int by_wq[4] = { 0 };
	for (int i = 0; i < 32; i++) {
		send_frame(sender, scq, mr, i);
		struct ibv_wc wc = poll_one(cq);
		EQ(wc.status, IBV_WC_SUCCESS);
		EQ(wc.byte_len, FRAME);
		for (int k = 0; k < 4; k++)
			by_wq[k] += wc.wr_id == wqs[k]->wq_num;
	}
	for (int i = 0; i < 4; i++)
		TRUE(by_wq[i] > 0);

	REFUSES(ibv_destroy_qp(qp), EBUSY);
	OK(ibv_destroy_flow(flow));
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_rwq_ind_table(table));
	overrun(&init, scq, mr, sender, 0);
	overrun(&init, scq, mr, sender, 1);
	OK(ibv_destroy_qp(sender));
	REFUSES(ibv_destroy_rwq_ind_table(table), EINVAL);
	for (int i = 0; i < 4; i++)
		OK(ibv_destroy_wq(wqs[i]));
	REFUSES(ibv_destroy_wq(wqs[0]), EINVAL);
	OK(ibv_dereg_mr(mr));
	OK(ibv_destroy_cq(cq));
	OK(ibv_destroy_cq(scq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	free(buf);
	return 0;
}
