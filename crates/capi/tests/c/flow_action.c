/*
 * ESP flow actions (ibv_flow_action_esp): what leaves is encrypted, what arrives is decrypted, once, and a third party sees
 * nothing of it; what is refused, and how.
 */
#include "check.h"

#include <arpa/inet.h>
#include <infiniband/ib_user_ioctl_verbs.h>
#include <unistd.h>

enum { SPI = 0x4321, HEADERS = 14 + 20 + 8 };

/* The names of the header and those of the manual page differ. */
struct parameters {
	struct ib_uverbs_flow_action_esp esp;
	struct ib_uverbs_flow_action_esp_keymat_aes_gcm keymat;
	struct ib_uverbs_flow_action_esp_replay_bmp replay;
	struct ibv_flow_ipv4_filter outer;
	struct ib_uverbs_flow_action_esp_encap encap;
	struct ibv_flow_action_esp_attr attr;
};

static struct parameters parameters(uint32_t flags)
{
	struct parameters p = {
		.esp = { .spi = SPI, .flags = flags },
		.keymat = { .iv = 5, .iv_algo = IB_UVERBS_FLOW_ACTION_IV_ALGO_SEQ, .salt = 0x01020304, .icv_len = 16, .key_len = 16,
			    .aes_key = { 1, 2, 3, 4 } },
		.replay = { .size = 64 },
		.outer = { .src_ip = htonl(0xc0a80001), .dst_ip = htonl(0xc0a80002) },
	};
	return p;
}

/* Where the parameters lie now. */
static struct ibv_flow_action_esp_attr *at(struct parameters *p, int tunnel)
{
	p->encap.val_ptr = &p->outer;
	p->encap.len = sizeof p->outer;
	p->encap.type = IBV_FLOW_SPEC_IPV4;
	p->attr = (struct ibv_flow_action_esp_attr){
		.esp_attr = (void *)&p->esp,
		.keymat_len = sizeof p->keymat,
		.keymat_ptr = &p->keymat,
		.replay_proto = IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP,
		.replay_len = sizeof p->replay,
		.replay_ptr = &p->replay,
		.esp_encap = tunnel ? (void *)&p->encap : NULL,
	};
	return &p->attr;
}

struct rule {
	struct ibv_flow_attr attr;
	struct ibv_flow_spec_ipv4 ip;
	struct ibv_flow_spec_esp esp;
	struct ibv_flow_spec_action_handle action;
} __attribute__((packed, aligned(8)));

static struct ibv_flow *make_flow(struct ibv_qp *qp, struct rule *r)
{
	return ibv_create_flow(qp, (void *)r);
}

/* Of packets that leave: all UDP; of packets that arrive: those of the SPI. */
static struct rule rule(const struct ibv_flow_action *action, int egress)
{
	struct rule r = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof r, .num_of_specs = 3, .port = 1,
			  .flags = egress ? IBV_FLOW_ATTR_FLAGS_EGRESS : 0 },
		.ip = { .type = IBV_FLOW_SPEC_IPV4, .size = sizeof r.ip },
		.esp = { .type = IBV_FLOW_SPEC_ESP, .size = sizeof r.esp, .val = { .spi = htonl(SPI) }, .mask = { .spi = 0xffffffff } },
		.action = { .type = IBV_FLOW_SPEC_ACTION_HANDLE, .size = sizeof r.action, .action = action },
	};
	if (egress) {
		struct ibv_flow_spec_tcp_udp udp = { .type = IBV_FLOW_SPEC_UDP, .size = sizeof udp };
		memcpy(&r.esp, &udp, sizeof udp);
		_Static_assert(sizeof udp <= sizeof r.esp, "it takes the other's place");
		memmove((char *)&r.esp + sizeof udp, &r.action, sizeof r.action);
	}
	return r;
}

static struct ibv_qp *raw_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp *qp = make_qp(pd, cq, IBV_QPT_RAW_PACKET, NULL, 1);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PORT));
	a.qp_state = IBV_QPS_RTR;
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE));
	a.qp_state = IBV_QPS_RTS;
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE));
	return qp;
}

static struct end raw_end(struct ibv_pd *pd)
{
	struct end e = { .cq = ibv_create_cq(pd->context, 32, NULL, NULL, 0), .buf = calloc(1, BUF) };
	TRUE(e.cq != NULL);
	e.qp = raw_qp(pd, e.cq);
	e.mr = ibv_reg_mr(pd, e.buf, BUF, IBV_ACCESS_LOCAL_WRITE);
	TRUE(e.mr != NULL);
	return e;
}

/* UDP over IPv4, the checksum of UDP left out; its length. */
static uint32_t packet(char *f, const char *payload)
{
	uint8_t len = strlen(payload);
	uint8_t ip[28] = { 0x45, 0, 0, 28 + len, 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 1, 0, 2, 0, 8 + len };
	memcpy(f, "\x02\0\0\0\0\x0b\x02\0\0\0\0\x0a\x08\0", 14);
	memcpy(f + 14, ip, sizeof ip);
	memcpy(f + HEADERS, payload, len);
	return HEADERS + len;
}

static void refuse(struct ibv_context *ctx, struct ibv_qp *qp)
{
	struct parameters p;
#define BAD(flags_, tunnel, change, error)                              \
	do {                                                            \
		p = parameters(flags_);                                 \
		struct ibv_flow_action_esp_attr *bad = at(&p, tunnel);  \
		change;                                                 \
		IS_NULL(ibv_create_flow_action_esp(ctx, bad), error);   \
	} while (0)
	const uint32_t full = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD;
	const uint32_t transport = full | IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT;
	IS_NULL(ibv_create_flow_action_esp(ctx, NULL), EINVAL);
	BAD(transport, 0, bad->esp_attr = NULL, EINVAL);
	BAD(transport, 0, bad->keymat_ptr = NULL, EINVAL);
	BAD(transport, 0, bad->keymat_len = 8, EINVAL);
	BAD(transport, 0, bad->keymat_proto = 1, EOPNOTSUPP);
	BAD(transport, 0, bad->replay_proto = 2, EOPNOTSUPP);
	BAD(transport, 0, bad->replay_ptr = NULL, EINVAL);
	BAD(transport, 0, bad->comp_mask = 2, EINVAL);
	BAD(transport, 0, p.esp.flags |= 1 << 10, EINVAL);
	BAD(transport, 0, p.esp.flags |= IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW, EINVAL);
	BAD(transport, 0, p.esp.tfc_pad = 1, EOPNOTSUPP);
	BAD(transport, 0, p.keymat.key_len = 17, EINVAL);
	BAD(transport, 0, p.keymat.icv_len = 4, EINVAL);
	BAD(transport, 0, p.keymat.iv_algo = 1, EOPNOTSUPP);
	BAD(transport, 0, p.replay.size = 1 << 17, EINVAL);
	BAD(transport, 1, (void)0, EINVAL);
	BAD(full, 0, (void)0, EINVAL);
	BAD(full, 1, p.encap.len = 4, EINVAL);
	BAD(full, 1, p.encap.type = IBV_FLOW_SPEC_TCP, EOPNOTSUPP);
	BAD(full, 1, p.encap.next_ptr = &p.encap, EOPNOTSUPP);
	BAD(IB_UVERBS_FLOW_ACTION_ESP_FLAGS_INLINE_CRYPTO, 0, (void)0, EINVAL);
	BAD(IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT | IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT, 0, bad->replay_proto = 0, EOPNOTSUPP);

	p = parameters(IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT);
	at(&p, 0)->replay_proto = IB_UVERBS_FLOW_ACTION_ESP_REPLAY_NONE;
	struct ibv_flow_action *decrypts = ibv_create_flow_action_esp(ctx, &p.attr);
	TRUE(decrypts != NULL);
	struct rule r = rule(decrypts, 1);
	IS_NULL(make_flow(qp, &r), EINVAL);
	r = rule(decrypts, 0);
	r.attr.flags = IBV_FLOW_ATTR_FLAGS_DONT_TRAP;
	IS_NULL(make_flow(qp, &r), EINVAL);
	/* Inline crypto wants to know the packets. */
	r = rule(decrypts, 0);
	r.attr.num_of_specs = 2;
	memcpy(&r.esp, &r.action, sizeof r.action);
	IS_NULL(make_flow(qp, &r), EINVAL);
	struct ibv_context *other = open_device();
	struct ibv_flow_action *foreign = ibv_create_flow_action_esp(other, &p.attr);
	TRUE(foreign != NULL);
	r = rule(foreign, 0);
	IS_NULL(make_flow(qp, &r), EINVAL);
	OK(ibv_destroy_flow_action(foreign));
	OK(ibv_close_device(other));
	p.esp.flags |= IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT;
	REFUSES(ibv_modify_flow_action_esp(decrypts, &p.attr), EINVAL);
	REFUSES(ibv_modify_flow_action_esp(decrypts, NULL), EINVAL);
	OK(ibv_destroy_flow_action(decrypts));
	REFUSES(ibv_destroy_flow_action(decrypts), EINVAL);
	REFUSES(ibv_modify_flow_action_esp(decrypts, &p.attr), EINVAL);
	r = rule(decrypts, 0);
	IS_NULL(make_flow(qp, &r), EINVAL);
}

static void converse(struct ibv_context *ctx, struct ibv_pd *pd, int tunnel)
{
	const uint32_t flags = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD |
			       (tunnel ? 0 : IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT);
	struct end a = raw_end(pd), b = raw_end(pd), ears = raw_end(pd);
	struct parameters out = parameters(flags | IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT), in = parameters(flags);
	struct ibv_flow_action *encrypts = ibv_create_flow_action_esp(ctx, at(&out, tunnel));
	struct ibv_flow_action *decrypts = ibv_create_flow_action_esp(ctx, at(&in, tunnel));
	TRUE(encrypts && decrypts);
	struct rule egress = rule(encrypts, 1), ingress = rule(decrypts, 0);
	struct rule sniffs = { .attr = { .type = IBV_FLOW_ATTR_SNIFFER, .size = sizeof sniffs.attr, .port = 1 } };
	struct ibv_flow *flows[] = { make_flow(a.qp, &egress), make_flow(b.qp, &ingress), make_flow(ears.qp, &sniffs) };
	TRUE(flows[0] && flows[1] && flows[2]);
	REFUSES(ibv_destroy_flow_action(encrypts), EBUSY);
	REFUSES(ibv_destroy_flow_action(decrypts), EBUSY);

	static const char secret[] = "nobody else's business";
	for (int i = 0; i < 3; i++) {
		OK(post_recv(&b, i, 2048));
		OK(post_recv(&ears, i, 2048));
		uint32_t len = packet(a.buf, secret);
		OK(post_send(&a, i, len, IBV_SEND_IP_CSUM));
		EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
		struct ibv_wc seen = poll_one(ears.cq), got = poll_one(b.cq);
		EQ(got.status, IBV_WC_SUCCESS);
		EQ(got.byte_len, len);
		/* All but the checksums, which were filled in. */
		EQ(memcmp(b.buf, a.buf, 24), 0);
		EQ(memcmp(b.buf + 26, a.buf + 26, 14), 0);
		EQ(memcmp(b.buf + HEADERS, a.buf + HEADERS, len - HEADERS), 0);
		/* ESP, IV, trailer and ICV at least, and a header more in a tunnel. */
		TRUE(seen.byte_len >= len + 8 + 8 + 2 + 16 + (tunnel ? 20 : 0));
		EQ(ears.buf[14 + 9], 50);
		TRUE(memmem(ears.buf, seen.byte_len, secret, sizeof secret - 1) == NULL);
		EQ(ntohl(*(uint32_t *)(ears.buf + 34)), SPI);
		EQ(ntohl(*(uint32_t *)(ears.buf + 38)), i + 1);
		/* What was overheard is not taken a second time. */
		memcpy(ears.buf + BUF / 2, ears.buf, seen.byte_len);
		struct ibv_sge sge = { (uintptr_t)ears.buf + BUF / 2, seen.byte_len, ears.mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
		OK(post_recv(&b, 100, 2048));
		OK(ibv_post_send(ears.qp, &wr, &bad));
		EQ(poll_one(ears.cq).status, IBV_WC_SUCCESS);
		EQ(ibv_poll_cq(b.cq, 1, &got), 0);
	}
	/* With another key at one end nothing arrives; with the same again at both it does. */
	out.keymat.aes_key[0] = 99;
	out.attr.esp_attr = NULL;
	out.attr.replay_proto = IB_UVERBS_FLOW_ACTION_ESP_REPLAY_NONE;
	OK(ibv_modify_flow_action_esp(encrypts, &out.attr));
	uint32_t len = packet(a.buf, secret);
	OK(post_send(&a, 7, len, 0));
	struct ibv_wc wc;
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	EQ(ibv_poll_cq(b.cq, 1, &wc), 0);
	in.keymat.aes_key[0] = 99;
	in.attr.esp_attr = NULL;
	in.attr.replay_proto = IB_UVERBS_FLOW_ACTION_ESP_REPLAY_NONE;
	OK(ibv_modify_flow_action_esp(decrypts, &in.attr));
	OK(post_send(&a, 8, len, 0));
	EQ(poll_one(b.cq).byte_len, len);

	for (int i = 0; i < 3; i++)
		OK(ibv_destroy_flow(flows[i]));
	OK(ibv_destroy_flow_action(encrypts));
	OK(ibv_destroy_flow_action(decrypts));
	free_end(&a), free_end(&b), free_end(&ears);
}

int main(void)
{
	if (geteuid() != 0) {
		fprintf(stderr, "SKIPPED: not root\n");
		return 0;
	}
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	struct end a = raw_end(pd);
	refuse(ctx, a.qp);
	free_end(&a);
	converse(ctx, pd, 0);
	converse(ctx, pd, 1);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
