/* The part of mistakes.c about datagrams that vanish. */

/* Sends a datagram of 8 bytes, and waits until it has arrived: one to the sender itself is behind it. */
static void deliver_datagram(struct end *a, struct end *b, uint32_t qkey)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	attr.grh.dgid = own_gid(a->qp->context);
	struct ibv_ah *ah = ibv_create_ah(a->mr->pd, &attr);
	remote_qkey = qkey;
	send_datagram(a, b->qp->qp_num, ah);
	OK(status_of_next(a));
	OK(post_recv(a, 9, 64));
	remote_qkey = 0x11111111;
	send_datagram(a, a->qp->qp_num, ah);
	OK(status_of_next(a) || status_of_next(a));
	OK(ibv_destroy_ah(ah));
}

/* A queue pair in a group is in use. */
static void destroyed_in_a_group(struct end *a, struct end *b)
{
	(void)b;
	union ibv_gid group = { .raw = { 0xff, 0x0e, [10] = 0xff, 0xff, 239, 1, 2, 3 } };
	struct ibv_qp *qp = make_qp(a->mr->pd, a->cq, IBV_QPT_UD, NULL, 0);
	OK(ibv_attach_mcast(qp, &group, 0));
	if (wrong)
		EQ(ibv_destroy_qp(qp), EBUSY);
	OK(ibv_detach_mcast(qp, &group, 0));
	OK(ibv_destroy_qp(qp));
}

/* A queue pair whose identifier has joined a group is in it, and in use. */
static void destroyed_in_a_joined_group(struct end *a, struct end *b)
{
	(void)a, (void)b;
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_UDP);
	struct sockaddr_storage own = address("127.0.0.1", 0), group = address("239.1.2.3", 0);
	OK(rdma_bind_addr(id, sa(&own)));
	create_qp(id, IBV_QPT_UD);
	OK(rdma_join_multicast(id, sa(&group), NULL));
	expect_ok(c, id, RDMA_CM_EVENT_MULTICAST_JOIN);
	if (wrong)
		EQ(ibv_destroy_qp(id->qp), EBUSY);
	OK(rdma_leave_multicast(id, sa(&group)));
	destroy_end(id);
	rdma_destroy_event_channel(c);
}

/* Messages of UC that are dropped: no receive, one that is too short, and memory without the right. The receiver takes them
 * unless this is wrong, and ends. */
static void end_receiver(struct end *a, struct end *b)
{
	OK(status_of_next(a));
	/* The message has arrived, or was dropped. */
	struct end c = make(a->mr->pd, IBV_QPT_UC), d = make(a->mr->pd, IBV_QPT_UC);
	connect_ends(&c, &d);
	OK(post_recv(&d, 1, 8));
	OK(send_some(&c, 1, 8, IBV_SEND_SIGNALED));
	OK(status_of_next(&c) || status_of_next(&d));
	free_end(&c), free_end(&d);
	OK(ibv_destroy_qp(b->qp));
	b->qp = make_qp(a->mr->pd, b->cq, IBV_QPT_UC, NULL, 0);
}

static void uc_without_receive(struct end *a, struct end *b)
{
	if (!wrong)
		OK(post_recv(b, 1, 8));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	if (!wrong)
		OK(status_of_next(b));
	end_receiver(a, b);
}

static void uc_receive_too_small(struct end *a, struct end *b)
{
	OK(post_recv(b, 1, wrong ? 7 : 8));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	if (!wrong)
		OK(status_of_next(b));
	end_receiver(a, b);
}

/* Posts a WRITE to a region that lacks the right if this is wrong. */
static struct ibv_mr *write_to_region(struct end *a, struct end *b)
{
	struct ibv_mr *mr = ibv_reg_mr(b->mr->pd, b->buf, 64, IBV_ACCESS_LOCAL_WRITE | (wrong ? 0 : IBV_ACCESS_REMOTE_WRITE));
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = 8, .lkey = a->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = (uintptr_t)b->buf, .rkey = mr->rkey } };
	OK(post(a, &wr));
	return mr;
}

static void uc_without_right(struct end *a, struct end *b)
{
	struct ibv_mr *mr = write_to_region(a, b);
	end_receiver(a, b);
	OK(ibv_dereg_mr(mr));
}

static void write_without_right(struct end *a, struct end *b)
{
	struct ibv_mr *mr = write_to_region(a, b);
	EQ(status_of_next(a), wrong ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS);
	OK(ibv_dereg_mr(mr));
}

/* The receiver takes it unless this is wrong, and ends. */
static void one_datagram(struct end *a, struct end *b, uint32_t qkey)
{
	deliver_datagram(a, b, qkey);
	if (!wrong)
		OK(status_of_next(b));
	OK(ibv_destroy_qp(b->qp));
	b->qp = make_qp(a->mr->pd, b->cq, IBV_QPT_UD, NULL, 0);
}

static void qkey_mismatch(struct end *a, struct end *b)
{
	OK(post_recv(b, 1, 64));
	/* Right: the highest bit asks for the sender's own, which is the same. */
	one_datagram(a, b, wrong ? 0x22222222 : 0x80000000);
}

static void datagram_without_receive(struct end *a, struct end *b)
{
	if (!wrong)
		OK(post_recv(b, 1, 64));
	one_datagram(a, b, 0x11111111);
}

static void datagram_too_long(struct end *a, struct end *b)
{
	OK(post_recv(b, 1, wrong ? 47 : 48));
	one_datagram(a, b, 0x11111111);
}

/* The receiver polls in vain, and ends the process at once. */
static void waits_for_a_datagram(struct end *a, struct end *b)
{
	struct ibv_wc wc;
	deliver_datagram(a, b, 0x11111111);
	EQ(ibv_poll_cq(b->cq, 1, &wc), 0);
	fflush(stdout);
	_exit(5);
}

/* The program ends without an end of its objects. */
static void leaves_a_lost_datagram(struct end *a, struct end *b)
{
	if (!wrong)
		OK(post_recv(b, 1, 64));
	deliver_datagram(a, b, 0x11111111);
	exit(0);
}

/* The table of P_Keys has 0xffff, 0x8001 and 0x7fff: the last is a limited member's of the first one's partition. */
static void pkey_mismatch(struct end *a, struct end *b)
{
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 0x11111111, .pkey_index = wrong ? 1 : 2 };
	OK(ibv_modify_qp(b->qp, &reset, IBV_QP_STATE));
	OK(ibv_modify_qp(b->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	to_rtr(b->qp, 0), to_rts(b->qp);
	OK(post_recv(b, 1, 64));
	one_datagram(a, b, 0x11111111);
}
