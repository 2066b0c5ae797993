/* RAW_PACKET queue pairs, flow rules and their counters, extended completions and sends; what is refused, and how. */
#include "check.h"

#include <arpa/inet.h>
#include <linux/capability.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static const uint8_t ALICE[6] = { 2, 0, 0, 0, 0, 0xa }, BOB[6] = { 2, 0, 0, 0, 0, 0xb };

struct rule {
	struct ibv_flow_attr attr;
	struct ibv_flow_spec_eth eth;
	struct ibv_flow_spec_ipv4 ip;
	struct ibv_flow_spec_action_tag tag;
	struct ibv_flow_spec_counter_action count;
} __attribute__((packed, aligned(8)));

static struct rule to_bob(void)
{
	struct rule r = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof r, .num_of_specs = 1, .port = 1 },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof r.eth },
		.ip = { .type = IBV_FLOW_SPEC_IPV4, .size = sizeof r.ip },
		.tag = { .type = IBV_FLOW_SPEC_ACTION_TAG, .size = sizeof r.tag, .tag_id = 0x1234 },
		.count = { .type = IBV_FLOW_SPEC_ACTION_COUNT, .size = sizeof r.count },
	};
	memcpy(r.eth.val.dst_mac, BOB, 6);
	memset(r.eth.mask.dst_mac, 0xff, 6);
	return r;
}

static struct ibv_qp *raw_qp(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t flags, uint64_t ops, uint16_t tso)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET, .pd = pd, .create_flags = flags,
		.send_ops_flags = ops, .max_tso_header = tso, .sq_sig_all = 1,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 128 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS |
			     IBV_QP_INIT_ATTR_MAX_TSO_HEADER,
	};
	return ibv_create_qp_ex(pd->context, &init);
}

static void start(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .port_num = 1 };
	REFUSES(ibv_modify_qp(qp, &a, IBV_QP_STATE), EINVAL);
	a.qp_state = IBV_QPS_INIT;
	REFUSES(ibv_modify_qp(qp, &a, IBV_QP_STATE), EINVAL);
	REFUSES(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX), EINVAL);
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PORT));
	a.qp_state = IBV_QPS_RTR;
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE));
	a.qp_state = IBV_QPS_RTS;
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE));
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(qp, &a, IBV_QP_STATE, &init));
	EQ(a.qp_state, IBV_QPS_RTS);
	EQ(a.port_num, 1);
	EQ(init.qp_type, IBV_QPT_RAW_PACKET);
	EQ(qp->state, IBV_QPS_RTS);
}

/* UDP over IPv4 in a C-VLAN, checksums left out; its length. */
static uint32_t frame(uint8_t *f, uint32_t payload)
{
	memcpy(f, BOB, 6);
	memcpy(f + 6, ALICE, 6);
	memcpy(f + 12, "\x81\x00\x20\x05\x08\x00", 6);
	uint8_t ip[28] = { 0x45, 0, 0, 28 + payload, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
			   0, 1, 0, 2, 0, 8 + payload };
	memcpy(f + 18, ip, sizeof ip);
	memset(f + 46, 0x5a, payload);
	return 46 + payload;
}

/* Rules that are none. */
static void refuse_rules(struct ibv_qp *qp, struct ibv_qp *ud, struct ibv_qp *rc)
{
	struct rule r = to_bob();
	IS_NULL(ibv_create_flow(qp, NULL), EINVAL);
	IS_NULL(ibv_create_flow(rc, (void *)&r), EINVAL);
	IS_NULL(ibv_create_flow(ud, (void *)&r), EOPNOTSUPP);
#define BAD(field, value)                                \
	do {                                             \
		struct rule bad = to_bob();              \
		bad.field = value;                       \
		IS_NULL(ibv_create_flow(qp, (void *)&bad), EINVAL); \
	} while (0)
	BAD(attr.comp_mask, 1);
	BAD(attr.port, 2);
	BAD(attr.type, 4);
	BAD(attr.flags, 1);
	BAD(attr.type, IBV_FLOW_ATTR_SNIFFER);
	BAD(eth.size, sizeof r.eth - 8);
	BAD(eth.type, 0x21);
	BAD(eth.type, IBV_FLOW_SPEC_ACTION_HANDLE);
	r.attr.num_of_specs = 2;
	memcpy(&r.ip, &r.eth, sizeof r.ip);
	IS_NULL(ibv_create_flow(qp, (void *)&r), EINVAL);
	r = to_bob();
	r.attr.num_of_specs = 2;
	r.eth.val.ether_type = htons(0x86dd);
	r.eth.mask.ether_type = 0xffff;
	IS_NULL(ibv_create_flow(qp, (void *)&r), EINVAL);
}

static void refuse_qps(struct ibv_pd *pd, struct ibv_cq *cq)
{
	IS_NULL(raw_qp(pd, cq, IBV_QP_CREATE_PCI_WRITE_END_PADDING, 0, 0), EOPNOTSUPP);
	IS_NULL(raw_qp(pd, cq, IBV_QP_CREATE_SOURCE_QPN, 0, 0), EOPNOTSUPP);
	IS_NULL(raw_qp(pd, cq, 0, IBV_QP_EX_WITH_RDMA_WRITE, 0), EOPNOTSUPP);
	IS_NULL(raw_qp(pd, cq, 0, 0, 0xffff), EINVAL);
	pid_t child = fork();
	if (child == 0) {
		/* Who may not open a raw socket gets no raw queue pair. */
		struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
		struct __user_cap_data_struct caps[2];
		OK(syscall(SYS_capget, &header, caps));
		caps[0].effective &= ~(1u << CAP_NET_RAW);
		OK(syscall(SYS_capset, &header, caps));
		struct ibv_context *ctx = open_device();
		struct ibv_pd *own = ibv_alloc_pd(ctx);
		struct ibv_cq *cqs = ibv_create_cq(ctx, 8, NULL, NULL, 0);
		TRUE(own && cqs);
		IS_NULL(raw_qp(own, cqs, 0, 0, 0), EPERM);
		_exit(0);
	}
	int status;
	EQ(waitpid(child, &status, 0), child);
	EQ(status, 0);
}

static void refuse_counters(struct ibv_context *ctx, struct ibv_counters *counters)
{
	struct ibv_counters_init_attr init = { .comp_mask = 1 };
	IS_NULL(ibv_create_counters(ctx, &init), EINVAL);
	struct ibv_counter_attach_attr attach = { .counter_desc = 2 };
	REFUSES(ibv_attach_counters_point_flow(counters, &attach, NULL), ENOTSUP);
	attach = (struct ibv_counter_attach_attr){ .index = 1 << 20 };
	REFUSES(ibv_attach_counters_point_flow(counters, &attach, NULL), EINVAL);
	attach = (struct ibv_counter_attach_attr){ .comp_mask = 1 };
	REFUSES(ibv_attach_counters_point_flow(counters, &attach, NULL), EINVAL);
	uint64_t value;
	REFUSES(ibv_read_counters(counters, &value, 1, 0), EINVAL);
	REFUSES(ibv_read_counters(counters, NULL, 0, 0), EINVAL);
}

/* A rate limit, by both calls. */
static void limit_rate(struct ibv_qp *qp, uint32_t max)
{
	struct ibv_qp_rate_limit_attr limit = { .rate_limit = 5000, .max_burst_sz = 9000, .typical_pkt_sz = 1500 };
	OK(ibv_modify_qp_rate_limit(qp, &limit));
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(qp, &a, IBV_QP_RATE_LIMIT, &init));
	EQ(a.rate_limit, 5000);
	limit.rate_limit = max + 1;
	EQ(ibv_modify_qp_rate_limit(qp, &limit), EINVAL);
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .rate_limit = 7000 };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_RATE_LIMIT));
	OK(ibv_query_qp(qp, &a, IBV_QP_RATE_LIMIT, &init));
	EQ(a.rate_limit, 7000);
	a.rate_limit = max + 1;
	REFUSES(ibv_modify_qp(qp, &a, IBV_QP_RATE_LIMIT), EINVAL);
	limit.rate_limit = 0;
	OK(ibv_modify_qp_rate_limit(qp, &limit));
	OK(ibv_query_qp(qp, &a, IBV_QP_RATE_LIMIT, &init));
	EQ(a.rate_limit, 0);
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	struct ibv_cq_init_attr_ex cia = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_CVLAN | IBV_WC_EX_WITH_FLOW_TAG };
	struct ibv_cq_ex *cqx = ibv_create_cq_ex(ctx, &cia);
	TRUE(pd && cqx);
	struct ibv_cq *cq = ibv_cq_ex_to_cq(cqx), *scq = ibv_create_cq(ctx, 64, NULL, NULL, 0);

	struct ibv_device_attr_ex dev = { 0 };
	OK(ibv_query_device_ex(ctx, NULL, &dev));
	TRUE(dev.orig_attr.device_cap_flags & IBV_DEVICE_MANAGED_FLOW_STEERING);
	TRUE(dev.orig_attr.device_cap_flags & IBV_DEVICE_RAW_IP_CSUM);
	TRUE(dev.device_cap_flags_ex & IBV_DEVICE_RAW_SCATTER_FCS);
	EQ(dev.raw_packet_caps, IBV_RAW_PACKET_CAP_CVLAN_STRIPPING | IBV_RAW_PACKET_CAP_SCATTER_FCS | IBV_RAW_PACKET_CAP_IP_CSUM);
	EQ(dev.tso_caps.supported_qpts, 1 << IBV_QPT_RAW_PACKET);
	TRUE(dev.tso_caps.max_tso >= 65536);
	TRUE(ibv_is_qpt_supported(dev.packet_pacing_caps.supported_qpts, IBV_QPT_RAW_PACKET));

	if (geteuid() != 0) {
		fprintf(stderr, "SKIPPED but for the refusal: not root\n");
		IS_NULL(raw_qp(pd, cq, 0, 0, 0), EPERM);
		return 0;
	}
	refuse_qps(pd, cq);
	struct ibv_qp *ud = make_qp(pd, scq, IBV_QPT_UD, NULL, 0), *rc = make_qp(pd, scq, IBV_QPT_RC, NULL, 0);
	struct end a = { .cq = scq, .buf = calloc(1, BUF) }, b = { .cq = cq, .buf = calloc(1, BUF) };
	a.qp = raw_qp(pd, scq, 0, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_TSO, 128);
	b.qp = raw_qp(pd, cq, IBV_QP_CREATE_CVLAN_STRIPPING, 0, 0);
	TRUE(a.qp && b.qp && a.qp->qp_num != b.qp->qp_num);
	a.mr = ibv_reg_mr(pd, a.buf, BUF, IBV_ACCESS_LOCAL_WRITE);
	b.mr = ibv_reg_mr(pd, b.buf, BUF, IBV_ACCESS_LOCAL_WRITE);
	EQ(post_recv(&b, 1, 2048), EINVAL);
	EQ(post_send(&a, 1, 64, 0), EINVAL);
	start(a.qp), start(b.qp);
	limit_rate(a.qp, dev.packet_pacing_caps.qp_rate_limit_max);
	REFUSES(ibv_attach_mcast(a.qp, &(union ibv_gid){ .raw = { 0xff } }, 0), EINVAL);

	refuse_rules(b.qp, ud, rc);
	struct ibv_counters_init_attr ci = { 0 };
	struct ibv_counters *counters = ibv_create_counters(ctx, &ci);
	TRUE(counters != NULL);
	refuse_counters(ctx, counters);
	OK(ibv_attach_counters_point_flow(counters, &(struct ibv_counter_attach_attr){ .counter_desc = IBV_COUNTER_PACKETS }, NULL));
	OK(ibv_attach_counters_point_flow(counters, &(struct ibv_counter_attach_attr){ .counter_desc = IBV_COUNTER_BYTES, .index = 1 }, NULL));

	struct rule r = to_bob();
	r.attr.num_of_specs = 4;
	r.ip.val.src_ip = htonl(0x0a000001);
	r.ip.mask.src_ip = 0xffffffff;
	r.count.counters = counters;
	struct ibv_flow *flow = ibv_create_flow(b.qp, (void *)&r);
	TRUE(flow != NULL);
	REFUSES(ibv_destroy_qp(b.qp), EBUSY);
	REFUSES(ibv_destroy_counters(counters), EBUSY);

	/* By ibv_post_send, with checksums filled in: the tag of the rule and of the VLAN come with it. */
	uint32_t len = frame((uint8_t *)a.buf, 10);
	OK(post_recv(&b, 5, 2048));
	OK(post_send(&a, 6, len, IBV_SEND_IP_CSUM));
	struct ibv_wc wc = poll_one(scq);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.wr_id, 6);
	struct ibv_poll_cq_attr pa = { 0 };
	OK(ibv_start_poll(cqx, &pa));
	EQ(cqx->wr_id, 5);
	EQ(cqx->status, IBV_WC_SUCCESS);
	EQ(ibv_wc_read_opcode(cqx), IBV_WC_RECV);
	EQ(ibv_wc_read_byte_len(cqx), len - 4);
	EQ(ibv_wc_read_flow_tag(cqx), 0x1234);
	EQ(ibv_wc_read_cvlan(cqx), 0x2005);
	EQ(ibv_wc_read_wc_flags(cqx), IBV_WC_IP_CSUM_OK);
	EQ(ibv_wc_read_qp_num(cqx), b.qp->qp_num);
	EQ(ibv_next_poll(cqx), ENOENT);
	ibv_end_poll(cqx);
	EQ(memcmp(b.buf + 42, a.buf + 46, 10), 0);

	/* By ibv_wr_*: inline, and payload in segments. */
	struct ibv_qp_ex *qpx = ibv_qp_to_qp_ex(a.qp);
	TRUE(qpx != NULL);
	for (int i = 0; i < 4; i++)
		OK(post_recv(&b, i, 2048));
	uint8_t header[58] = { 0 };
	frame(header, 0);
	memcpy(header + 18 + 9, "\x06", 1);
	header[18 + 20 + 12] = 0x50;
	ibv_wr_start(qpx);
	qpx->wr_id = 7;
	qpx->wr_flags = IBV_SEND_IP_CSUM;
	ibv_wr_send(qpx);
	ibv_wr_set_inline_data(qpx, a.buf, len);
	qpx->wr_id = 8;
	ibv_wr_send_tso(qpx, header, sizeof header, 1000);
	ibv_wr_set_sge(qpx, a.mr->lkey, (uintptr_t)a.buf, 2500);
	OK(ibv_wr_complete(qpx));
	EQ(poll_one(scq).opcode, IBV_WC_SEND);
	wc = poll_one(scq);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.opcode, IBV_WC_TSO);
	const uint32_t lens[] = { len - 4, 1054, 1054, 554 };
	for (int i = 0; i < 4; i++) {
		wc = poll_one(cq);
		EQ(wc.status, IBV_WC_SUCCESS);
		EQ(wc.byte_len, lens[i]);
		EQ(wc.wc_flags, IBV_WC_IP_CSUM_OK);
	}
	ibv_wr_start(qpx);
	ibv_wr_send_tso(qpx, header, 129, 1000);
	EQ(ibv_wr_complete(qpx), EINVAL);
	ibv_wr_start(qpx);
	ibv_wr_rdma_write(qpx, 1, 1);
	EQ(ibv_wr_complete(qpx), EOPNOTSUPP);

	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 2500, .lkey = a.mr->lkey };
	struct ibv_send_wr tso = { .wr_id = 9, .opcode = IBV_WR_TSO, .sg_list = &sge, .num_sge = 1,
				   .tso = { .hdr = header, .hdr_sz = sizeof header, .mss = 0 } }, *bad = NULL;
	REFUSES(ibv_post_send(a.qp, &tso, &bad), EINVAL);
	TRUE(bad == &tso);
	tso.tso.mss = 3000;
	OK(post_recv(&b, 9, 4096));
	OK(ibv_post_send(a.qp, &tso, &bad));
	EQ(poll_one(cq).byte_len, 2554);
	tso.opcode = IBV_WR_RDMA_READ;
	REFUSES(ibv_post_send(a.qp, &tso, &bad), EINVAL);

	uint64_t values[2];
	OK(ibv_read_counters(counters, values, 2, IBV_READ_COUNTERS_ATTR_PREFER_CACHED));
	EQ(values[0], 6);
	EQ(values[1], 2 * len + 3 * 58 + 2500 + 58 + 2500);
	REFUSES(ibv_attach_counters_point_flow(counters, &(struct ibv_counter_attach_attr){ 0 }, NULL), EBUSY);
	REFUSES(ibv_attach_counters_point_flow(counters, &(struct ibv_counter_attach_attr){ 0 }, flow), ENOTSUP);

	IS_NULL(ibv_create_flow_action_esp(ctx, &(struct ibv_flow_action_esp_attr){ 0 }), EINVAL);

	OK(ibv_destroy_flow(flow));
	REFUSES(ibv_destroy_flow(flow), EINVAL);
	OK(ibv_destroy_counters(counters));
	OK(ibv_destroy_qp(a.qp));
	OK(ibv_destroy_qp(b.qp));
	REFUSES(ibv_destroy_qp(b.qp), EINVAL);
	OK(ibv_destroy_qp(ud));
	OK(ibv_destroy_qp(rc));
	OK(ibv_dereg_mr(a.mr));
	OK(ibv_dereg_mr(b.mr));
	OK(ibv_destroy_cq(cq));
	OK(ibv_destroy_cq(scq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
