/* Two processes, of which one makes a mistake that the other end takes part in: the checker looks at both. The first argument is
 * the name of the mistake, the second "wrong" or "right", the third "one" or "two" hosts, the fourth "first" or "second": the
 * process that makes the mistake. It says of each process its number and its exit status, and what it wrote. */
#include "hosts.h"

static const char *mistake;
static bool wrong, is_maker;
static enum ibv_qp_type type;

/* The queue pairs of the mistake, and others that make none: what comes by them comes after what was sent before. */
static struct end e, next;
static struct address peer, peers_next;
static struct ibv_pd *pd, *other_pd;
static int sgid_index;

static bool is(const char *name)
{
	return !strcmp(mistake, name);
}

/* This process makes the mistake of this name. */
static bool makes(const char *name)
{
	return wrong && is_maker && is(name);
}

static void init(struct ibv_qp *qp, int pkey_index)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x11111111, .pkey_index = pkey_index,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	mask |= qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
	OK(ibv_modify_qp(qp, &a, mask));
}

static void rts(struct ibv_qp *qp, uint32_t psn)
{
	/* Where no answer is expected it is awaited for a quarter of a second, elsewhere for two: a busy machine may be late. */
	bool is_silent = wrong && !strncmp(mistake, "ends-differ", 11) && !is("ends-differ-in-mtu");
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTS, .timeout = is_silent ? 14 : 17, .retry_cnt = 3,
		.rnr_retry = wrong && is("receive-not-posted") ? 1 : 7, .max_rd_atomic = 1, .sq_psn = psn };
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	OK(ibv_modify_qp(qp, &a, mask));
}

static void make(struct address *own)
{
	struct ibv_context *ctx = open_device();
	sgid_index = gid_index(ctx);
	pd = ibv_alloc_pd(ctx), other_pd = ibv_alloc_pd(ctx);
	e = make_end(pd, makes("ends-differ-in-type") ? IBV_QPT_UC : type), next = make_end(pd, type);
	OK(ibv_dereg_mr(e.mr));
	int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
	if (makes("region-without-right") || makes("uc-without-right"))
		rights = IBV_ACCESS_LOCAL_WRITE;
	if (makes("receive-without-right"))
		rights = 0;
	e.mr = ibv_reg_mr(makes("pd-mismatch") ? other_pd : pd, e.buf, BUF, rights);
	TRUE(other_pd && e.mr);
	bool is_of_other_partition = is_maker && (is("pkey-mismatch") || is("ends-differ-in-partition"));
	/* The table has 0xffff, 0x8001 and 0x7fff: the last is a limited member's of the first one's partition. */
	init(e.qp, is_of_other_partition ? wrong ? 1 : 2 : 0);
	init(next.qp, 0);
	*own = (struct address){ .qpn = e.qp->qp_num, .va = (uintptr_t)e.buf, .lkey = e.mr->lkey, .rkey = e.mr->rkey };
	OK(ibv_query_gid(ctx, 1, sgid_index, &own->gid));
}

static void connect_both(void)
{
	tell(&next.qp->qp_num, sizeof next.qp->qp_num);
	peers_next = peer;
	TRUE(hear(&peers_next.qpn, sizeof peers_next.qpn));
	OK(rtr(next.qp, sgid_index, &peers_next, IBV_MTU_1024, 1));
	rts(next.qp, 1);
	struct address to = peer;
	if (makes("ends-differ-in-number"))
		to.qpn = peers_next.qpn;
	if (makes("ends-differ-in-address"))
		to.gid.raw[15] = 9;
	OK(rtr(e.qp, sgid_index, &to, makes("ends-differ-in-mtu") ? IBV_MTU_512 : IBV_MTU_1024, 1));
	rts(e.qp, makes("ends-differ-in-psn") || makes("ends-differ-in-psn-of-a-write") ? 0x64 : 1);
}

/* Posts a request to the other end. */
static void ask(struct end *from, const struct address *to, enum ibv_wr_opcode opcode, uint32_t len, uint32_t key, unsigned int flags)
{
	struct ibv_sge sge = { .addr = (uintptr_t)from->buf, .length = len, .lkey = from->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = flags }, *bad;
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
		.grh = { .dgid = to->gid, .sgid_index = sgid_index, .hop_limit = 64 } };
	struct ibv_ah *ah = NULL;
	if (type == IBV_QPT_UD) {
		ah = ibv_create_ah(pd, &attr);
		TRUE(ah != NULL);
		wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = to->qpn, wr.wr.ud.remote_qkey = key;
	} else {
		wr.wr.rdma.remote_addr = to->va, wr.wr.rdma.rkey = key;
	}
	OK(ibv_post_send(from->qp, &wr, &bad));
	if (ah) {
		OK(poll_one(from->cq).status);
		OK(ibv_destroy_ah(ah));
	}
}

static void send_some(uint32_t len, unsigned int flags)
{
	ask(&e, &peer, IBV_WR_SEND, len, 0x11111111, IBV_SEND_SIGNALED | flags);
}

/* The next completion has this status if the mistake is made. */
static void completes_with(enum ibv_wc_status status)
{
	EQ(poll_one(e.cq).status, wrong ? status : IBV_WC_SUCCESS);
}

/* The end that sends here, and the one that receives. What was sent before has arrived when both return. */
static void sends_next(void)
{
	ask(&next, &peers_next, IBV_WR_SEND, 8, 0x11111111, IBV_SEND_SIGNALED);
	if (type != IBV_QPT_UD)
		OK(poll_one(next.cq).status);
	meet();
}

static void receives_next(void)
{
	OK(poll_one(next.cq).status);
	meet();
}

/* One end posts a receive of this length, if there is one, and the other one sends. */
static void receives(int len)
{
	if (len)
		OK(post_recv(&e, 1, len));
	OK(post_recv(&next, 1, 64));
	meet();
}

static void writes_with_lkey(void)
{
	if (!is_maker)
		return;
	ask(&e, &peer, IBV_WR_RDMA_WRITE, 8, wrong ? peer.lkey : peer.rkey, IBV_SEND_SIGNALED);
	completes_with(IBV_WC_REM_ACCESS_ERR);
}

static void other_writes(void)
{
	if (is_maker)
		return;
	ask(&e, &peer, IBV_WR_RDMA_WRITE, 8, peer.rkey, IBV_SEND_SIGNALED);
	completes_with(IBV_WC_REM_ACCESS_ERR);
}

static void other_writes_to_what_has_ended(void)
{
	if (makes(mistake)) {
		OK(ibv_dereg_mr(e.mr));
		e.mr = NULL;
	}
	meet();
	other_writes();
}

/* The other end sends 8 bytes to the maker, which posts a receive of this length. */
static void other_sends(int len, enum ibv_wc_status received, enum ibv_wc_status sent)
{
	if (is_maker) {
		receives(len);
		if (received || !wrong)
			completes_with(received);
		return;
	}
	meet();
	send_some(8, 0);
	completes_with(sent);
}

static void receive_without_right(void)
{
	other_sends(64, IBV_WC_LOC_PROT_ERR, IBV_WC_REM_OP_ERR);
}

static void receive_too_small(void)
{
	other_sends(wrong ? 7 : 8, IBV_WC_LOC_LEN_ERR, IBV_WC_REM_INV_REQ_ERR);
}

static void receive_not_posted(void)
{
	other_sends(wrong ? 0 : 8, IBV_WC_SUCCESS, IBV_WC_RNR_RETRY_EXC_ERR);
}

static void ends_differ(void)
{
	other_sends(64, IBV_WC_SUCCESS, IBV_WC_RETRY_EXC_ERR);
}

/* The maker sends. */
static void ends_differ_in_psn(void)
{
	if (!is_maker) {
		receives(64);
		if (!wrong)
			OK(poll_one(e.cq).status);
		return;
	}
	meet();
	send_some(8, 0);
	completes_with(IBV_WC_RETRY_EXC_ERR);
}

/* The maker writes: between processes of one host that could be a copy, which shows no PSN. */
static void ends_differ_in_psn_of_a_write(void)
{
	meet();
	if (!is_maker)
		return;
	ask(&e, &peer, IBV_WR_RDMA_WRITE, 8, peer.rkey, IBV_SEND_SIGNALED);
	completes_with(IBV_WC_RETRY_EXC_ERR);
}

static void ends_differ_in_mtu(void)
{
	if (is_maker) {
		receives(8192);
		/* The queue pair goes to ERR. */
		completes_with(IBV_WC_WR_FLUSH_ERR);
		return;
	}
	meet();
	send_some(8192, 0);
	completes_with(IBV_WC_REM_INV_REQ_ERR);
}

/* The maker sends a datagram that the other end does not take. */
static void datagram_is_not_taken(void)
{
	if (!is_maker) {
		receives(64);
		if (!wrong)
			OK(poll_one(e.cq).status);
		return receives_next();
	}
	meet();
	ask(&e, &peer, IBV_WR_SEND, 8, makes("qkey-mismatch") ? 0x22222222 : 0x11111111, IBV_SEND_SIGNALED);
	sends_next();
}

/* The maker does not take what the other end sends. */
static void silent_message(int len, bool is_write)
{
	if (is_maker) {
		receives(len);
		if (!wrong && !is_write)
			OK(poll_one(e.cq).status);
		return receives_next();
	}
	meet();
	if (is_write)
		ask(&e, &peer, IBV_WR_RDMA_WRITE, 8, peer.rkey, IBV_SEND_SIGNALED);
	else
		send_some(8, 0);
	if (type != IBV_QPT_UD)
		OK(poll_one(e.cq).status);
	sends_next();
}

static void message_without_receive(void)
{
	silent_message(wrong ? 0 : 64, false);
}

static void datagram_too_long(void)
{
	silent_message(wrong ? 47 : 48, false);
}

static void uc_receive_too_small(void)
{
	silent_message(wrong ? 7 : 8, false);
}

static void uc_without_right(void)
{
	silent_message(0, true);
}

/* The rest are mistakes of the sender alone. How a message travels decides when its memory is read. */
static void buffer_changed(void)
{
	if (!is_maker)
		return receives(64);
	meet();
	send_some(8, wrong ? 0 : IBV_SEND_INLINE);
	e.buf[3] = 7;
	OK(poll_one(e.cq).status);
}

static void mr_deregistered_with_work(void)
{
	if (!is_maker)
		return receives(64);
	meet();
	send_some(8, wrong ? 0 : IBV_SEND_INLINE);
	OK(ibv_dereg_mr(e.mr));
	e.mr = NULL;
	OK(poll_one(e.cq).status);
}

static void read_without_fence(void)
{
	if (!is_maker)
		return receives(64);
	meet();
	ask(&e, &peer, IBV_WR_RDMA_READ, 8, peer.rkey, 0);
	send_some(8, wrong ? 0 : IBV_SEND_FENCE);
	OK(poll_one(e.cq).status);
}

static const struct {
	const char *name;
	enum ibv_qp_type type;
	void (*run)(void);
} all[] = {
	{ "lkey-used-as-rkey", IBV_QPT_RC, writes_with_lkey },
	{ "region-without-right", IBV_QPT_RC, other_writes },
	{ "receive-without-right", IBV_QPT_RC, receive_without_right },
	{ "pd-mismatch", IBV_QPT_RC, other_writes },
	{ "use-after-destroy", IBV_QPT_RC, other_writes_to_what_has_ended },
	{ "receive-too-small", IBV_QPT_RC, receive_too_small },
	{ "receive-not-posted", IBV_QPT_RC, receive_not_posted },
	{ "ends-differ-in-psn", IBV_QPT_RC, ends_differ_in_psn },
	{ "ends-differ-in-psn-of-a-write", IBV_QPT_RC, ends_differ_in_psn_of_a_write },
	{ "ends-differ-in-mtu", IBV_QPT_RC, ends_differ_in_mtu },
	{ "ends-differ-in-number", IBV_QPT_RC, ends_differ },
	{ "ends-differ-in-address", IBV_QPT_RC, ends_differ },
	{ "ends-differ-in-partition", IBV_QPT_RC, ends_differ },
	{ "ends-differ-in-type", IBV_QPT_RC, ends_differ },
	{ "qkey-mismatch", IBV_QPT_UD, datagram_is_not_taken },
	{ "pkey-mismatch", IBV_QPT_UD, datagram_is_not_taken },
	{ "datagram-without-receive", IBV_QPT_UD, message_without_receive },
	{ "datagram-too-long", IBV_QPT_UD, datagram_too_long },
	{ "uc-without-receive", IBV_QPT_UC, message_without_receive },
	{ "uc-receive-too-small", IBV_QPT_UC, uc_receive_too_small },
	{ "uc-without-right", IBV_QPT_UC, uc_without_right },
	{ "buffer-changed", IBV_QPT_RC, buffer_changed },
	{ "mr-deregistered-with-work", IBV_QPT_RC, mr_deregistered_with_work },
	{ "read-without-fence", IBV_QPT_RC, read_without_fence },
};

static void (*run_mistake)(void);

static void run_end(void)
{
	is_maker = is_server;
	exchange(&peer, make);
	connect_both();
	meet();
	run_mistake();
	/* Nothing is under way when the objects end. */
	meet();
	struct ibv_context *ctx = pd->context;
	OK(ibv_destroy_qp(e.qp) || ibv_destroy_qp(next.qp));
	OK(ibv_destroy_cq(e.cq) || ibv_destroy_cq(next.cq));
	OK((e.mr && ibv_dereg_mr(e.mr)) || ibv_dereg_mr(next.mr));
	OK(ibv_dealloc_pd(pd) || ibv_dealloc_pd(other_pd) || ibv_close_device(ctx));
	free(e.buf), free(next.buf);
}

int main(int argc, char **argv)
{
	TRUE(argc == 5);
	mistake = argv[1], wrong = !strcmp(argv[2], "wrong"), two = !strcmp(argv[3], "two");
	for (size_t n = 0; n < sizeof all / sizeof *all; n++)
		if (is(all[n].name))
			type = all[n].type, run_mistake = all[n].run;
	TRUE(run_mistake != NULL);
	bool maker = !strcmp(argv[4], "second");
	pid_t pids[2];
	begin_hosts(pids, !maker, run_end);
	for (int n = 0; n < 2; n++) {
		int status;
		EQ(waitpid(pids[n], &status, 0), pids[n]);
		const char *who = n == maker ? "maker: " : "peer: ";
		dprintf(1, "%sprocess %d ended with %d\n", who, pids[n], WIFEXITED(status) ? WEXITSTATUS(status) : -1);
		copy(said[n], who);
		copy(logged[n], who);
	}
	_exit(0);
}
