/* The objects of one side, and their connection with the other's. */
#include "exchange.h"

static int is(const char *type)
{
	return !strcmp(opt.type, type);
}

/* source | 64 bytes of words for each queue pair | slots | numbered messages (uc) | local buffers | receives */
size_t at_source(void)
{
	return 0;
}
size_t at_words(int qp)
{
	return SOURCE + qp * 64;
}
size_t at_slot(int qp, int slot)
{
	return at_words(MAX_QPS) + (size_t)(qp * MAX_DEPTH + slot) * opt.size;
}
size_t at_message(unsigned int number)
{
	return at_slot(MAX_QPS, 0) + (size_t)number * opt.size;
}
size_t at_local(int qp, int slot)
{
	return at_message(is("uc") ? opt.qps * opt.count : 0) + (size_t)(qp * MAX_DEPTH + slot) * opt.size;
}
size_t at_receive(int number)
{
	return at_local(MAX_QPS, 0) + (size_t)number * (opt.size + 40);
}
size_t memory_len(void)
{
	return at_receive(RECEIVES * MAX_QPS);
}

static struct ibv_qp *make_qp(struct side *side, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = type,
		.pd = side->pd,
		.send_cq = side->cq,
		.recv_cq = side->cq,
		.srq = type == IBV_QPT_RC && opt.srq ? side->srq : NULL,
		.xrcd = side->xrcd,
		.cap = { .max_send_wr = 2 * MAX_DEPTH, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = type == IBV_QPT_XRC_RECV ? IBV_QP_INIT_ATTR_XRCD : IBV_QP_INIT_ATTR_PD,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(side->context, &init);
	if (!qp)
		die(WRONG, "no queue pair: %s", strerror(errno));
	return qp;
}

static struct ibv_srq *make_srq(struct side *side)
{
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = RECEIVES * MAX_QPS, .max_sge = 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD,
		.srq_type = is("xrc") ? IBV_SRQT_XRC : IBV_SRQT_BASIC,
		.pd = side->pd,
		.xrcd = side->xrcd,
		.cq = side->cq,
	};
	if (is("xrc"))
		init.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
	struct ibv_srq *srq = ibv_create_srq_ex(side->context, &init);
	if (!srq)
		die(WRONG, "no shared receive queue: %s", strerror(errno));
	return srq;
}

static void modify(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (ibv_modify_qp(qp, attr, mask | IBV_QP_STATE))
		die(WRONG, "cannot modify a queue pair to state %d: %s", attr->qp_state, strerror(errno));
}

static void connect_qp(struct side *side, struct ibv_qp *qp, uint32_t dest)
{
	int reliable = !is("uc"), initiator = qp->qp_type == IBV_QPT_XRC_SEND, target = qp->qp_type == IBV_QPT_XRC_RECV;
	enum ibv_mtu mtu = IBV_MTU_256;
	while (mtu < IBV_MTU_4096 && 128 << mtu < opt.mtu)
		mtu++;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC };
	modify(qp, &attr, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = mtu, .dest_qp_num = dest, .rq_psn = opt.seed & 0xffffff,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1,
			.grh = { .dgid = side->theirs.gid, .sgid_index = opt.gid, .hop_limit = 64 } } };
	int mask = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (reliable && !initiator)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	modify(qp, &attr, mask);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = opt.seed & 0xffffff, .timeout = opt.timeout,
		.retry_cnt = opt.retries, .rnr_retry = 7, .max_rd_atomic = 4 };
	mask = IBV_QP_SQ_PSN;
	if (reliable)
		mask |= IBV_QP_TIMEOUT;
	if (reliable && !target)
		mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	modify(qp, &attr, mask);
}

static void ready_ud(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x11111111 };
	modify(qp, &attr, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
	attr.qp_state = IBV_QPS_RTR;
	modify(qp, &attr, 0);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .sq_psn = opt.seed & 0xffffff };
	modify(qp, &attr, IBV_QP_SQ_PSN);
}

void post_receive(struct side *side, int number)
{
	struct ibv_sge sge = { (uintptr_t)side->memory + at_receive(number), opt.size + 40, side->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 1ull << 32 | number, .sg_list = &sge, .num_sge = 1 }, *bad;
	int failed = side->srq ? ibv_post_srq_recv(side->srq, &wr, &bad)
			       : ibv_post_recv(side->qp[number / RECEIVES], &wr, &bad);
	if (failed)
		die(WRONG, "cannot post a receive: %s", strerror(failed));
}

int poll_side(struct side *side, struct ibv_wc *wcs, int most)
{
	int n = ibv_poll_cq(side->cq, most, wcs);
	if (n == 0 && opt.events) {
		if (ibv_req_notify_cq(side->cq, 0))
			die(WRONG, "cannot arm the completion queue");
		n = ibv_poll_cq(side->cq, most, wcs);
		struct pollfd pfd = { .fd = side->channel->fd, .events = POLLIN };
		if (n == 0 && poll(&pfd, 1, 10) == 1) {
			struct ibv_cq *cq;
			void *context;
			if (ibv_get_cq_event(side->channel, &cq, &context))
				die(WRONG, "no event although there is one");
			ibv_ack_cq_events(cq, 1);
			n = ibv_poll_cq(side->cq, most, wcs);
		}
	}
	if (n < 0)
		die(WRONG, "cannot poll the completion queue");
	return n;
}

static void open_objects(struct side *side)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	if (!list || !list[0] || !(side->context = ibv_open_device(list[0])))
		die(WRONG, "no device");
	ibv_free_device_list(list);
	side->pd = ibv_alloc_pd(side->context);
	side->channel = ibv_create_comp_channel(side->context);
	side->cq = ibv_create_cq(side->context, 2 * MAX_QPS * (RECEIVES + 2 * MAX_DEPTH), NULL, side->channel, 0);
	if (is("xrc")) {
		struct ibv_xrcd_init_attr init = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
			.oflags = O_CREAT };
		side->xrcd = ibv_open_xrcd(side->context, &init);
	}
	if (!side->pd || !side->channel || !side->cq || (is("xrc") && !side->xrcd))
		die(WRONG, "cannot make the objects: %s", strerror(errno));
	if (opt.srq || is("xrc"))
		side->srq = make_srq(side);
	side->memory = aligned_alloc(4096, (memory_len() + 4095) & ~4095ul);
	memset(side->memory, 0, memory_len());
	pattern(side->memory + at_source(), SOURCE, opt.seed * 2 + !!opt.host);
	side->mr = ibv_reg_mr(side->pd, side->memory, memory_len(),
			      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
	if (!side->mr || ibv_query_gid(side->context, 1, opt.gid, &side->mine.gid))
		die(WRONG, "no region, or no GID: %s", strerror(errno));
}

void open_side(struct side *side, int tcp)
{
	memset(side, 0, sizeof *side);
	side->tcp = tcp;
	if (is("ud") && opt.size > opt.mtu)
		opt.size = opt.mtu - 100;
	open_objects(side);
	enum ibv_qp_type type = is("ud") ? IBV_QPT_UD : is("uc") ? IBV_QPT_UC : is("xrc") ? IBV_QPT_XRC_SEND : IBV_QPT_RC;
	for (int i = 0; i < opt.qps; i++) {
		side->qp[i] = make_qp(side, type);
		side->target[i] = is("xrc") ? make_qp(side, IBV_QPT_XRC_RECV) : side->qp[i];
		side->mine.qpn[i] = side->target[i]->qp_num;
		if (is("ud"))
			ready_ud(side->qp[i]);
	}
	if (is("xrc") && ibv_get_srq_num(side->srq, &side->mine.srqn))
		die(WRONG, "no number of the SRQ");
	side->mine.addr = (uintptr_t)side->memory;
	side->mine.rkey = side->mr->rkey;
	/* The initiators' numbers are what the other's targets expect. */
	uint32_t numbers[2][MAX_QPS] = { 0 };
	for (int i = 0; i < opt.qps; i++)
		numbers[0][i] = side->qp[i]->qp_num;
	swap_over_tcp(tcp, &side->mine, &side->theirs, sizeof side->mine);
	swap_over_tcp(tcp, numbers[0], numbers[1], sizeof numbers[0]);
	for (int i = 0; i < opt.qps && !is("ud"); i++) {
		connect_qp(side, side->qp[i], side->theirs.qpn[i]);
		if (side->target[i] != side->qp[i])
			connect_qp(side, side->target[i], numbers[1][i]);
	}
	if (is("ud")) {
		struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1,
			.grh = { .dgid = side->theirs.gid, .sgid_index = opt.gid, .hop_limit = 64 } };
		side->ah = ibv_create_ah(side->pd, &attr);
		if (!side->ah)
			die(WRONG, "no address handle: %s", strerror(errno));
	}
	for (int i = 0; i < opt.qps * RECEIVES; i++)
		post_receive(side, i);
	char mine = 'r', theirs;
	swap_over_tcp(tcp, &mine, &theirs, 1);
}
