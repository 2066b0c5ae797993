/* Mistakes one after the other, of which the log says in a line what was wrong. The test looks at the lines. */
#include "check.h"
#include <rdma/rdma_cma.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static struct ibv_context *ctx;
static struct ibv_pd *pd;

/* Two connected queue pairs. What b has registered may have windows. */
static void make_pair(struct end *a, struct end *b, int access)
{
	*a = make_end(pd, IBV_QPT_RC), *b = make_end(pd, IBV_QPT_RC);
	OK(ibv_dereg_mr(b->mr));
	b->mr = ibv_reg_mr(pd, b->buf, BUF,
			   access | IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	TRUE(b->mr != NULL);
	connect_ends(a, b);
}

static void free_pair(struct end *a, struct end *b)
{
	free_end(a), free_end(b);
}

/* A request of a fails. */
static void fails(struct end *a, enum ibv_wr_opcode opcode, uint64_t at, uint32_t rkey, uint32_t vendor_err)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = 8, .lkey = a->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = at, .rkey = rkey } }, *bad;
	OK(ibv_post_send(a->qp, &wr, &bad));
	struct ibv_wc wc = poll_one(a->cq);
	EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
	EQ(wc.vendor_err, vendor_err);
}

static uint32_t bind_window(struct end *e, struct ibv_mw *mw, int access)
{
	struct ibv_mw_bind_info to = { .mr = e->mr, .addr = (uintptr_t)e->buf, .length = 64, .mw_access_flags = access };
	if (mw->type == IBV_MW_TYPE_1) {
		struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED, .bind_info = to };
		OK(ibv_bind_mw(e->qp, mw, &bind));
	} else {
		struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED,
			.bind_mw = { .mw = mw, .rkey = ibv_inc_rkey(mw->rkey), .bind_info = to } }, *bad;
		OK(ibv_post_send(e->qp, &wr, &bad));
	}
	EQ(poll_one(e->cq).status, IBV_WC_SUCCESS);
	return mw->rkey;
}

static void windows(void)
{
	struct end a, b;
	for (int kind = 0; kind < 6; kind++) {
		make_pair(&a, &b, IBV_ACCESS_MW_BIND);
		uint64_t at = (uintptr_t)b.buf;
		struct ibv_mw *mw = ibv_alloc_mw(pd, kind == 1 || kind == 5 ? IBV_MW_TYPE_2 : IBV_MW_TYPE_1);
		TRUE(mw != NULL);
		if (kind == 0) {
			fails(&a, IBV_WR_RDMA_WRITE, at, mw->rkey, 1011);
		} else if (kind == 1) {
			struct ibv_send_wr wr = { .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED,
				.invalidate_rkey = bind_window(&b, mw, IBV_ACCESS_REMOTE_WRITE) }, *bad;
			OK(ibv_post_send(b.qp, &wr, &bad));
			EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
			fails(&a, IBV_WR_RDMA_WRITE, at, wr.invalidate_rkey, 1011);
		} else if (kind == 2) {
			fails(&a, IBV_WR_RDMA_READ, at, bind_window(&b, mw, IBV_ACCESS_REMOTE_WRITE), 1014);
		} else if (kind == 3) {
			fails(&a, IBV_WR_RDMA_WRITE, at + 60, bind_window(&b, mw, IBV_ACCESS_REMOTE_WRITE), 1013);
		} else if (kind == 4) {
			uint32_t before = bind_window(&b, mw, IBV_ACCESS_REMOTE_WRITE);
			bind_window(&b, mw, IBV_ACCESS_REMOTE_WRITE);
			fails(&a, IBV_WR_RDMA_WRITE, at, before, 1012);
		} else {
			uint32_t key = mw->rkey;
			OK(ibv_dealloc_mw(mw));
			mw = NULL;
			fails(&a, IBV_WR_RDMA_WRITE, at, key, 1002);
		}
		if (mw)
			OK(ibv_dealloc_mw(mw));
		free_pair(&a, &b);
	}
}

static void zero_based(void)
{
	struct end a, b;
	make_pair(&a, &b, IBV_ACCESS_ZERO_BASED);
	fails(&a, IBV_WR_RDMA_WRITE, (uintptr_t)b.buf, b.mr->rkey, 1015);
	free_pair(&a, &b);
}

/* The region is of the queue pair's protection domain, and the SRQ is not. */
static void srq_of_other_pd(void)
{
	struct ibv_pd *other = ibv_alloc_pd(ctx);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(other, &init);
	TRUE(srq != NULL);
	struct end a = make_end(pd, IBV_QPT_RC), b = a;
	b.qp = make_qp(pd, b.cq, IBV_QPT_RC, srq, 0);
	connect_ends(&a, &b);
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 64, .lkey = a.mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	OK(ibv_post_srq_recv(srq, &wr, &bad));
	OK(post_send(&a, 1, 8, IBV_SEND_SIGNALED));
	for (int n = 0; n < 2; n++) {
		struct ibv_wc wc = poll_one(a.cq);
		EQ(wc.vendor_err, wc.status == IBV_WC_LOC_PROT_ERR ? 404 : 1101);
	}
	REFUSES(post_recv(&b, 1, 64), EINVAL);
	OK(ibv_destroy_qp(b.qp));
	free_end(&a);
	OK(ibv_destroy_srq(srq));
	OK(ibv_dealloc_pd(other));
}

/* The memory of a region may not be written any more: that of a WRITE, and that of a receive. */
static void write_protected(void)
{
	struct end a, b;
	for (int receives = 0; receives < 2; receives++) {
		make_pair(&a, &b, 0);
		char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct ibv_mr *mr = ibv_reg_mr(pd, page, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
		TRUE(mr != NULL);
		OK(mprotect(page, 4096, PROT_READ));
		if (receives) {
			struct ibv_sge sge = { .addr = (uintptr_t)page, .length = 64, .lkey = mr->lkey };
			struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
			OK(ibv_post_recv(b.qp, &wr, &bad));
			OK(post_send(&a, 1, 8, IBV_SEND_SIGNALED));
			EQ(poll_one(a.cq).vendor_err, 1101);
			EQ(poll_one(b.cq).vendor_err, 409);
		} else {
			fails(&a, IBV_WR_RDMA_WRITE, (uintptr_t)page, mr->rkey, 1016);
		}
		OK(ibv_dereg_mr(mr));
		OK(munmap(page, 4096));
		free_pair(&a, &b);
	}
}

/* A range far behind the region, and a SEND that invalidates the key of a region. */
static void told_by_the_peer(void)
{
	struct end a, b;
	make_pair(&a, &b, 0);
	fails(&a, IBV_WR_RDMA_WRITE, (uintptr_t)b.buf + (1 << 30), b.mr->rkey, 1005);
	free_pair(&a, &b);
	make_pair(&a, &b, 0);
	OK(post_recv(&b, 1, 64));
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 8, .lkey = a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED,
		.invalidate_rkey = b.mr->rkey }, *bad;
	OK(ibv_post_send(a.qp, &wr, &bad));
	/* Another one, which finds the peer in ERR. */
	OK(post_send(&a, 2, 8, IBV_SEND_SIGNALED));
	struct ibv_wc wc = poll_one(b.cq);
	EQ(wc.status, IBV_WC_LOC_ACCESS_ERR);
	EQ(wc.vendor_err, 602);
	do
		wc = poll_one(a.cq);
	while (wc.status == IBV_WC_SUCCESS);
	EQ(wc.status, IBV_WC_RETRY_EXC_ERR);
	EQ(wc.vendor_err, 1217);
	free_pair(&a, &b);
}

/* A forked child names what its parent made. */
static void by_a_child(void)
{
	struct end e = make_end(pd, IBV_QPT_RC);
	fflush(stdout);
	pid_t child = fork();
	if (child == 0) {
		struct ibv_qp_init_attr init = { .send_cq = e.cq, .recv_cq = e.cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
		IS_NULL(ibv_create_qp(pd, &init), EIO);
		REFUSES(post_recv(&e, 1, 8), EIO);
		_exit(0);
	}
	int status;
	EQ(waitpid(child, &status, 0), child);
	EQ(status, 0);
	free_end(&e);
}

/* More receives of an SRQ complete than the queue has room for, and the program moves the queue pair to ERR at once. */
static void overrun(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	for (int round = 0; round < 20; round++) {
		struct ibv_srq *srq = ibv_create_srq(pd, &init);
		TRUE(srq != NULL);
		struct end a = make_end(pd, IBV_QPT_RC), b = a;
		b.cq = ibv_create_cq(ctx, 2, NULL, NULL, 0);
		b.qp = make_qp(pd, b.cq, IBV_QPT_RC, srq, 0);
		connect_ends(&a, &b);
		struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 64, .lkey = a.mr->lkey };
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
		for (int n = 0; n < 4; n++)
			OK(ibv_post_srq_recv(srq, &wr, &bad));
		for (int n = 0; n < 4; n++)
			OK(post_send(&a, n, 8, IBV_SEND_SIGNALED));
		/* The third one is lost there. */
		for (int n = 0; n < 3; n++)
			poll_one(a.cq);
		to_err(b.qp);
		OK(ibv_destroy_qp(b.qp));
		OK(ibv_destroy_cq(b.cq));
		OK(ibv_destroy_srq(srq));
		free_end(&a);
	}
}

/* Calls that are refused. */
static void refused(void)
{
	struct end a, b;
	make_pair(&a, &b, 0);
	REFUSES(ibv_destroy_cq(a.cq), EBUSY);
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 8, .lkey = a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_TSO }, *bad;
	REFUSES(ibv_post_send(a.qp, &wr, &bad), EOPNOTSUPP);
	struct ibv_cq_init_attr_ex cq = { .cqe = 1, .wc_flags = 1ull << 40 };
	IS_NULL(ibv_create_cq_ex(ctx, &cq), EOPNOTSUPP);
	struct ibv_qp_init_attr_ex init = { .send_cq = a.cq, .recv_cq = a.cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND };
	struct ibv_qp *qp = ibv_create_qp_ex(ctx, &init);
	TRUE(qp != NULL);
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);
	ibv_wr_start(ex);
	ibv_wr_rdma_write(ex, b.mr->rkey, (uintptr_t)b.buf);
	ibv_wr_set_sge(ex, a.mr->lkey, (uintptr_t)a.buf, 8);
	REFUSES(ibv_wr_complete(ex), EOPNOTSUPP);

	/* In RESET, then an address of nobody. */
	struct end reset = a;
	reset.qp = qp;
	REFUSES(post_recv(&reset, 1, 8), EINVAL);
	to_init(qp);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_512, .dest_qp_num = b.qp->qp_num,
		.ah_attr = { .is_global = 1, .port_num = 1 } };
	REFUSES(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), EINVAL);
	IS_NULL(ibv_create_ah(pd, &attr.ah_attr), EINVAL);
	memcpy(attr.ah_attr.grh.dgid.raw + 10, "\xff\xff", 2);
	IS_NULL(ibv_create_ah(pd, &attr.ah_attr), EINVAL);
	OK(ibv_destroy_qp(qp));
	free_pair(&a, &b);
}

static struct rdma_cm_event *next(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *e = NULL;
	OK(rdma_get_cm_event(channel, &e));
	EQ(e->event, type);
	return e;
}

static void connect_without_queue_pair(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener, *id;
	OK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	OK(rdma_bind_addr(listener, (struct sockaddr *)&to));
	OK(rdma_listen(listener, 1));
	to.sin_port = rdma_get_src_port(listener);
	OK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	OK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	OK(rdma_ack_cm_event(next(channel, RDMA_CM_EVENT_ADDR_RESOLVED)));
	OK(rdma_resolve_route(id, 2000));
	OK(rdma_ack_cm_event(next(channel, RDMA_CM_EVENT_ROUTE_RESOLVED)));
	struct rdma_conn_param param = { .retry_count = 7 };
	OK(rdma_connect(id, &param));
	struct rdma_cm_event *e = next(channel, RDMA_CM_EVENT_REJECTED);
	EQ(e->status, 5);
	OK(rdma_ack_cm_event(e));
	OK(rdma_destroy_id(id));
	OK(rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
}

/* The program at the other end destroys the id of the request. Then a port that is taken. */
static void never_accepted(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener, *id;
	OK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) }, any = to;
	OK(rdma_bind_addr(listener, (struct sockaddr *)&to));
	OK(rdma_listen(listener, 1));
	to.sin_port = rdma_get_src_port(listener);
	OK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	OK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	OK(rdma_ack_cm_event(next(channel, RDMA_CM_EVENT_ADDR_RESOLVED)));
	OK(rdma_resolve_route(id, 2000));
	OK(rdma_ack_cm_event(next(channel, RDMA_CM_EVENT_ROUTE_RESOLVED)));
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	OK(rdma_create_qp(id, NULL, &init));
	struct rdma_conn_param param = { .retry_count = 7 };
	OK(rdma_connect(id, &param));
	struct rdma_cm_event *e = next(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *request = e->id;
	OK(rdma_ack_cm_event(e));
	OK(rdma_destroy_id(request));
	e = next(channel, RDMA_CM_EVENT_REJECTED);
	EQ(e->status, 28);
	OK(rdma_ack_cm_event(e));
	rdma_destroy_qp(id);
	OK(rdma_destroy_id(id));

	OK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	EQ(rdma_bind_addr(id, (struct sockaddr *)&to), -1);
	EQ(errno, EADDRINUSE);
	any.sin_addr.s_addr = 0, any.sin_port = to.sin_port;
	EQ(rdma_bind_addr(id, (struct sockaddr *)&any), -1);
	EQ(errno, EADDRNOTAVAIL);
	OK(rdma_destroy_id(id));
	OK(rdma_destroy_id(listener));
	rdma_destroy_event_channel(channel);
}

/* Frames that are too short, if the program may send frames at all. */
static void raw_packet(void)
{
	struct end e = make_end(pd, IBV_QPT_RC);
	struct ibv_qp_init_attr init = { .send_cq = e.cq, .recv_cq = e.cq, .qp_type = IBV_QPT_RAW_PACKET,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	OK(ibv_destroy_qp(e.qp));
	e.qp = ibv_create_qp(pd, &init);
	TRUE(e.qp || errno == EPERM);
	puts(e.qp ? "raw packets" : "no raw packets");
	if (!e.qp) {
		e.qp = make_qp(pd, e.cq, IBV_QPT_RC, NULL, 0);
		return free_end(&e);
	}
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	OK(ibv_modify_qp(e.qp, &attr, IBV_QP_STATE | IBV_QP_PORT));
	attr.qp_state = IBV_QPS_RTR;
	OK(ibv_modify_qp(e.qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	OK(ibv_modify_qp(e.qp, &attr, IBV_QP_STATE));
	OK(post_send(&e, 1, 5, IBV_SEND_SIGNALED));
	OK(post_send(&e, 2, 64, IBV_SEND_SIGNALED));
	struct ibv_wc wc = poll_one(e.cq);
	EQ(wc.status, IBV_WC_LOC_LEN_ERR);
	EQ(wc.vendor_err, 104);
	wc = poll_one(e.cq);
	EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
	EQ(wc.vendor_err, 104);

	/* Memory that is not its own, after a move back. */
	attr.qp_state = IBV_QPS_RTS;
	attr.cur_qp_state = IBV_QPS_SQE;
	OK(ibv_modify_qp(e.qp, &attr, IBV_QP_STATE));
	e.mr->lkey ^= 0x15;
	OK(post_send(&e, 3, 64, IBV_SEND_SIGNALED));
	e.mr->lkey ^= 0x15;
	wc = poll_one(e.cq);
	EQ(wc.status, IBV_WC_LOC_PROT_ERR);
	EQ(wc.vendor_err, 401);
	free_end(&e);
}

/* The log has twenty lines of failed work in a second. So an argument chooses one half of the mistakes. */
int main(int argc, char **argv)
{
	setlinebuf(stdout);
	ctx = open_device();
	pd = ibv_alloc_pd(ctx);
	if (argc > 1 && !strcmp(argv[1], "second")) {
		write_protected();
		told_by_the_peer();
		by_a_child();
		overrun();
		never_accepted();
		return 0;
	}
	windows();
	zero_based();
	srq_of_other_pd();
	refused();
	connect_without_queue_pair();
	raw_packet();
	struct ibv_cq *cq = ibv_create_cq(ctx, 1, NULL, NULL, 0);
	struct ibv_wc wc;
	OK(ibv_destroy_cq(cq));
	EQ(ibv_poll_cq(cq, 1, &wc), -1);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
