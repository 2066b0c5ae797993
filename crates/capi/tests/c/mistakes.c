/* Programs with one mistake each, which the checker finds, and programs that look like them and are right. The first argument
 * is the name of the check, the second "wrong" or "right", the third "plain" or "extended": the calls that post and poll. */
#include "cm.h"
#include <linux/capability.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static bool wrong, extended;
static int result; /* the exit status */

/* As make_end, with queues of the wanted kind. */
static struct end make(struct ibv_pd *pd, enum ibv_qp_type type)
{
	struct end e = make_end(pd, type);
	if (!extended)
		return e;
	OK(ibv_destroy_qp(e.qp));
	OK(ibv_destroy_cq(e.cq));
	struct ibv_cq_init_attr_ex cq = { .cqe = 32, .wc_flags = IBV_WC_EX_WITH_QP_NUM };
	e.cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(pd->context, &cq));
	struct ibv_qp_init_attr_ex qp = { .send_cq = e.cq, .recv_cq = e.cq, .qp_type = type, .pd = pd,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND };
	if (type != IBV_QPT_UD)
		qp.send_ops_flags |= IBV_QP_EX_WITH_RDMA_WRITE;
	if (type == IBV_QPT_RC)
		qp.send_ops_flags |= IBV_QP_EX_WITH_RDMA_READ;
	e.qp = ibv_create_qp_ex(pd->context, &qp);
	TRUE(e.cq && e.qp);
	return e;
}

/* Posts a request by the wanted calls. */
static int post(struct end *e, struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;
	if (!extended)
		return ibv_post_send(e->qp, wr, &bad);
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(e->qp);
	ibv_wr_start(qp);
	qp->wr_id = wr->wr_id, qp->wr_flags = wr->send_flags & ~IBV_SEND_INLINE;
	if (wr->opcode == IBV_WR_SEND)
		ibv_wr_send(qp);
	else if (wr->opcode == IBV_WR_RDMA_READ)
		ibv_wr_rdma_read(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
	else
		ibv_wr_rdma_write(qp, wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
	if (e->qp->qp_type == IBV_QPT_UD)
		ibv_wr_set_ud_addr(qp, wr->wr.ud.ah, wr->wr.ud.remote_qpn, wr->wr.ud.remote_qkey);
	if (wr->send_flags & IBV_SEND_INLINE)
		ibv_wr_set_inline_data(qp, (void *)(uintptr_t)wr->sg_list->addr, wr->sg_list->length);
	else
		ibv_wr_set_sge(qp, wr->sg_list->lkey, wr->sg_list->addr, wr->sg_list->length);
	return ibv_wr_complete(qp);
}

/* Posts a SEND. */
static int send_some(struct end *e, uint64_t id, uint32_t len, unsigned int flags)
{
	struct ibv_sge sge = { .addr = (uintptr_t)e->buf, .length = len, .lkey = e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = flags };
	return post(e, &wr);
}

/* Polls until there is one, and gives its status. */
static int status_of_next(struct end *e)
{
	if (!extended)
		return poll_one(e->cq).status;
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)e->cq;
	struct ibv_poll_cq_attr attr = { 0 };
	double until = now() + 10;
	int ret;
	while ((ret = ibv_start_poll(cq, &attr)) == ENOENT)
		TRUE(now() < until);
	EQ(ret, 0);
	int status = cq->status;
	ibv_end_poll(cq);
	return status;
}

static uint32_t remote_qkey = 0x11111111;

/* Sends a datagram from one queue pair to the other, by this address handle. */
static void send_datagram(struct end *e, uint32_t dest, struct ibv_ah *ah)
{
	struct ibv_sge sge = { .addr = (uintptr_t)e->buf, .length = 8, .lkey = e->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 5, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.ud = { .ah = ah, .remote_qpn = dest, .remote_qkey = remote_qkey } };
	OK(post(e, &wr));
}

static void qp_destroyed_with_work(struct end *a, struct end *b)
{
	OK(post_recv(b, 1, 64) || post_recv(b, 2, 64));
	OK(send_some(a, 3, 8, 0));
	/* Right: its completion says that the unsignaled one before it is complete, too. */
	OK(send_some(a, 4, 8, wrong ? 0 : IBV_SEND_SIGNALED));
	if (!wrong)
		OK(status_of_next(a));
}

static void mr_deregistered_with_work(struct end *a, struct end *b)
{
	struct end other = *a;
	other.buf = calloc(1, 64);
	other.mr = ibv_reg_mr(a->mr->pd, other.buf, 64, IBV_ACCESS_LOCAL_WRITE);
	OK(post_recv(b, 1, 64));
	OK(send_some(&other, 2, 8, IBV_SEND_SIGNALED | (wrong ? 0 : IBV_SEND_INLINE)));
	OK(ibv_dereg_mr(other.mr));
	OK(status_of_next(a));
	free(other.buf);
}

static void ah_destroyed_with_work(struct end *a, struct end *b)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 64 } };
	attr.grh.dgid = own_gid(a->qp->context);
	struct ibv_ah *ah = ibv_create_ah(a->mr->pd, &attr);
	TRUE(ah != NULL);
	OK(post_recv(b, 1, 64));
	send_datagram(a, b->qp->qp_num, ah);
	if (wrong)
		OK(ibv_destroy_ah(ah));
	OK(status_of_next(a));
	if (!wrong)
		OK(ibv_destroy_ah(ah));
}

static void buffer_changed(struct end *a, struct end *b)
{
	/* The checker looks where the region is now. */
	static char moved[64];
	OK(ibv_rereg_mr(a->mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, moved, sizeof moved, 0));
	struct end other = *a;
	other.buf = moved;
	OK(post_recv(b, 1, 64));
	OK(send_some(&other, 2, 8, IBV_SEND_SIGNALED | (wrong ? 0 : IBV_SEND_INLINE)));
	moved[3] = 7;
	OK(status_of_next(a));
}

static void ud_receive_without_grh(struct end *a, struct end *b)
{
	(void)a;
	OK(post_recv(b, 1, wrong ? 39 : 40));
}

static void inline_too_long(struct end *a, struct end *b)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(a->qp, &attr, IBV_QP_CAP, &init));
	OK(post_recv(b, 1, 4096));
	int ret = send_some(a, 2, init.cap.max_inline_data + wrong, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
	if (!ret)
		OK(status_of_next(a));
}

/* Posts until the queue is full, and then as much again. */
static void send_queue_unsignaled(struct end *a, struct end *b)
{
	for (int n = 0; n < 8; n++)
		OK(post_recv(b, n, 64));
	int ret = 0;
	/* Right: every fourth is signaled, so that its completion gives back the room of four. */
	for (int n = 0; !ret; n++)
		ret = send_some(a, n, 8, !wrong && n % 4 == 3 ? IBV_SEND_SIGNALED : 0);
	EQ(ret, ENOMEM);
	if (!wrong) {
		OK(status_of_next(a));
		OK(send_some(a, 99, 0, IBV_SEND_SIGNALED));
	}
	to_err(a->qp);
}

static void ended_in_use(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_cq *cq = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	struct ibv_qp *qp = make_qp(a->mr->pd, cq, IBV_QPT_RC, NULL, 0);
	if (wrong)
		EQ(ibv_destroy_cq(cq), EBUSY);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(cq));
}

static struct ibv_cq *event_of;

/* Wrong: the first thread waits for longer than the checker does. Right: another one may acknowledge the event while it waits. */
static void let_wait(void)
{
	usleep(wrong ? 2000000 : 0);
	char path[64], state = 0;
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", getpid());
	for (; !wrong && state != 'S'; usleep(1000)) {
		FILE *file = fopen(path, "r");
		TRUE(file && fscanf(file, "%*d (%*[^)]) %c", &state) == 1);
		fclose(file);
	}
}

static void *acknowledge(void *unused)
{
	let_wait();
	ibv_ack_cq_events(event_of, 1);
	return unused;
}

static void unacknowledged_event(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_comp_channel *channel = ibv_create_comp_channel(a->cq->context);
	event_of = ibv_create_cq(a->cq->context, 8, NULL, channel, 0);
	struct ibv_qp *qp = make_qp(a->mr->pd, event_of, IBV_QPT_RC, NULL, 0);
	to_init(qp);
	struct end e = *a;
	e.qp = qp;
	OK(post_recv(&e, 1, 8));
	OK(ibv_req_notify_cq(event_of, 0));
	to_err(qp);
	struct ibv_cq *found;
	void *context;
	OK(ibv_get_cq_event(channel, &found, &context));
	OK(ibv_destroy_qp(qp));
	pthread_t thread;
	OK(pthread_create(&thread, NULL, acknowledge, NULL));
	OK(ibv_destroy_cq(event_of));
	OK(pthread_join(thread, NULL));
	OK(ibv_destroy_comp_channel(channel));
}

/* As `e`, with a queue pair that completes in a queue for four and takes its receives from an SRQ, if there is one. */
static struct end with_small_cq(struct end *e, struct end *peer, struct ibv_srq *srq)
{
	struct end small = *e;
	small.cq = ibv_create_cq(e->cq->context, 4, NULL, NULL, 0);
	EQ(small.cq->cqe, 4);
	small.qp = make_qp(e->mr->pd, small.cq, IBV_QPT_RC, srq, 0);
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	OK(ibv_modify_qp(peer->qp, &reset, IBV_QP_STATE));
	connect_ends(&small, peer);
	return small;
}

static void cq_too_small(struct end *a, struct end *b)
{
	struct end small = with_small_cq(a, b, NULL);
	/* Wrong: five completions can come. The last one has to wait for a receive, so that the queue does not overrun. */
	for (int n = 0; n < (wrong ? 4 : 5); n++)
		OK(post_recv(b, n, 64));
	/* Right: the queue pair has room for more, but never has more outstanding. */
	for (int n = 0; n < 5; n++) {
		OK(post_send(&small, n, 8, IBV_SEND_SIGNALED));
		if (!wrong)
			OK(poll_one(small.cq).status);
	}
	for (int n = 0; wrong && n < 4; n++)
		OK(poll_one(small.cq).status);
	to_err(small.qp);
	OK(ibv_destroy_qp(small.qp));
	OK(ibv_destroy_cq(small.cq));
}

static void cq_overrun(struct end *a, struct end *b)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(a->mr->pd, &init);
	struct end small = with_small_cq(b, a, srq);
	for (int n = 0; n < 5; n++) {
		struct ibv_sge sge = { .addr = (uintptr_t)b->buf, .length = 64, .lkey = b->mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = n, .sg_list = &sge, .num_sge = 1 }, *bad;
		OK(ibv_post_srq_recv(srq, &wr, &bad));
	}
	for (int n = 0; n < 5; n++) {
		OK(send_some(a, n, 8, IBV_SEND_SIGNALED));
		if (!wrong)
			OK(poll_one(small.cq).status);
	}
	if (wrong) {
		struct ibv_async_event event;
		OK(ibv_get_async_event(a->cq->context, &event));
		EQ(event.event_type, IBV_EVENT_CQ_ERR);
		ibv_ack_async_event(&event);
	}
	to_err(a->qp), to_err(small.qp);
	OK(ibv_destroy_qp(small.qp));
	OK(ibv_destroy_srq(srq));
	OK(ibv_destroy_cq(small.cq));
}

#include "mistakes_of_threads.h"

static void lkey_used_as_rkey(struct end *a, struct end *b)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = 8, .lkey = a->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = (uintptr_t)b->buf, .rkey = wrong ? b->mr->lkey : b->mr->rkey } };
	OK(post(a, &wr));
	EQ(status_of_next(a), wrong ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS);
}

/* Sends from memory of `from` to memory of `to`. */
static void send_between(struct end *from, struct end *to, unsigned int flags)
{
	OK(post_recv(to, 1, 64));
	OK(send_some(from, 2, 8, IBV_SEND_SIGNALED | flags));
}

static void rights_too_weak(struct end *a, struct end *b)
{
	struct end other = wrong ? *b : *a;
	/* Right: a SEND only reads. */
	other.mr = ibv_reg_mr(a->mr->pd, other.buf, 64, 0);
	send_between(wrong ? a : &other, wrong ? &other : b, 0);
	EQ(status_of_next(b), wrong ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS);
	EQ(status_of_next(a), wrong ? IBV_WC_REM_OP_ERR : IBV_WC_SUCCESS);
	OK(ibv_dereg_mr(other.mr));
}

static void pd_mismatch(struct end *a, struct end *b)
{
	struct ibv_pd *pd = ibv_alloc_pd(a->cq->context);
	struct end other = *a;
	other.mr = ibv_reg_mr(pd, other.buf, 64, IBV_ACCESS_LOCAL_WRITE);
	send_between(&other, b, wrong ? 0 : IBV_SEND_INLINE);
	EQ(status_of_next(a), wrong ? IBV_WC_LOC_PROT_ERR : IBV_WC_SUCCESS);
	OK(ibv_dereg_mr(other.mr));
	OK(ibv_dealloc_pd(pd));
}

static void receive_too_small(struct end *a, struct end *b)
{
	OK(post_recv(b, 1, wrong ? 7 : 8));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	EQ(status_of_next(b), wrong ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS);
	to_err(a->qp);
}

static void receive_not_posted(struct end *a, struct end *b)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };
	OK(ibv_modify_qp(a->qp, &attr, IBV_QP_STATE));
	to_init(a->qp), to_rtr(a->qp, b->qp->qp_num);
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = wrong ? 1 : 7 };
	OK(ibv_modify_qp(a->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		IBV_QP_MAX_QP_RD_ATOMIC));
	OK(send_some(a, 2, 8, IBV_SEND_SIGNALED));
	/* Right: the message waits for it. */
	usleep(100000);
	if (!wrong)
		OK(post_recv(b, 1, 8));
	EQ(status_of_next(a), wrong ? IBV_WC_RNR_RETRY_EXC_ERR : IBV_WC_SUCCESS);
}

/* A READ, a SEND of the bytes that it brings, and one of others, which is right. */
static void read_and_send(struct end *a, struct end *b, unsigned int flags)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = 8, .lkey = a->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
		.wr.rdma = { .remote_addr = (uintptr_t)b->buf, .rkey = b->mr->rkey } };
	struct end other = *a;
	other.buf += 8;
	OK(post_recv(b, 1, 64) || post_recv(b, 2, 64));
	OK(post(a, &wr));
	/* A fence comes too late for inline data. */
	OK(send_some(wrong || !(flags & IBV_SEND_INLINE) ? a : &other, 2, 8, flags));
	OK(send_some(&other, 3, 8, IBV_SEND_SIGNALED));
	OK(status_of_next(a));
}

static void read_without_fence(struct end *a, struct end *b)
{
	read_and_send(a, b, wrong ? 0 : IBV_SEND_FENCE);
}

static void inline_read_without_fence(struct end *a, struct end *b)
{
	read_and_send(a, b, IBV_SEND_INLINE | IBV_SEND_FENCE);
}

/* Takes from this thread the right to pin as much as it likes. */
static void be_limited(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[2];
	OK(syscall(SYS_capget, &header, data));
	data[0].effective &= ~(1u << CAP_IPC_LOCK);
	OK(syscall(SYS_capset, &header, data));
	struct rlimit limit;
	OK(getrlimit(RLIMIT_MEMLOCK, &limit));
	limit.rlim_cur = 1 << 20;
	OK(setrlimit(RLIMIT_MEMLOCK, &limit));
}

static void memory_beyond_memlock(struct end *a, struct end *b)
{
	(void)b;
	const size_t half = 500000;
	char *memory = calloc(1, 2 * half);
	be_limited();
	/* Both ends have registered some already. */
	struct ibv_mr *first = ibv_reg_mr(a->mr->pd, memory, half, 0);
	if (!wrong)
		OK(ibv_dereg_mr(first));
	struct ibv_mr *second = ibv_reg_mr(a->mr->pd, memory + half, half, 0);
	TRUE(first && second);
	if (wrong)
		OK(ibv_dereg_mr(first));
	OK(ibv_dereg_mr(second));
	free(memory);
}

static void post_to_srq(struct ibv_srq *srq, struct end *e)
{
	struct ibv_sge sge = { .addr = (uintptr_t)e->buf, .length = 64, .lkey = e->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	OK(ibv_post_srq_recv(srq, &wr, &bad));
}

static void srq_last_wqe(struct end *a, struct end *b)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(a->mr->pd, &init);
	struct end small = with_small_cq(b, a, srq);
	post_to_srq(srq, b);
	to_err(small.qp);
	if (!wrong) {
		struct ibv_async_event event;
		OK(ibv_get_async_event(a->cq->context, &event));
		EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
		ibv_ack_async_event(&event);
	}
	OK(ibv_destroy_qp(small.qp));
	post_to_srq(srq, b);
	OK(ibv_destroy_srq(srq));
	OK(ibv_destroy_cq(small.cq));
}

static void use_after_destroy(struct end *a, struct end *b)
{
	(void)b;
	struct end other = make(a->mr->pd, IBV_QPT_RC);
	OK(ibv_destroy_qp(other.qp));
	/* Right: a new queue pair in the place of the old one. */
	if (!wrong)
		other.qp = make_qp(a->mr->pd, other.cq, IBV_QPT_RC, NULL, 0);
	if (!wrong || !extended)
		EQ(post_recv(&other, 1, 8), EINVAL);
	else
		EQ(ibv_modify_qp(other.qp, &(struct ibv_qp_attr){ .qp_state = IBV_QPS_RESET }, IBV_QP_STATE), EINVAL);
	if (!wrong)
		OK(ibv_destroy_qp(other.qp));
	OK(ibv_dereg_mr(other.mr));
	OK(ibv_destroy_cq(other.cq));
	free(other.buf);
}

#include "mistakes_of_processes.h"
#include "mistakes_of_ends.h"
#include "mistakes_of_queues.h"
#include "mistakes_of_rows.h"

static void failed_wc_opcode(struct end *a, struct end *b)
{
	(void)b;
	to_err(a->qp);
	OK(send_some(a, 1, 8, IBV_SEND_SIGNALED));
	if (extended) {
		struct ibv_cq_ex *cq = (struct ibv_cq_ex *)a->cq;
		struct ibv_poll_cq_attr attr = { 0 };
		OK(ibv_start_poll(cq, &attr));
		EQ(cq->status, IBV_WC_WR_FLUSH_ERR);
		EQ(ibv_wc_read_qp_num(cq), a->qp->qp_num);
		/* Not by accident the opcode of a send. */
		TRUE(!wrong || ibv_wc_read_opcode(cq) != IBV_WC_SEND);
		ibv_end_poll(cq);
		return;
	}
	struct ibv_wc wc = poll_one(a->cq);
	EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
	/* The program takes it for a receive, since it looks at the opcode. */
	if (wrong && wc.opcode & IBV_WC_RECV)
		result = 3;
}

#include "mistakes_of_connections.h"
#include "mistakes_of_datagrams.h"

/* The device plays one without SRQs. */
static void refused_by_persona(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_device_attr has;
	OK(ibv_query_device(a->cq->context, &has));
	EQ(has.max_srq, 0);
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	if (wrong)
		IS_NULL(ibv_create_srq(a->mr->pd, &init), EOPNOTSUPP);
}

/* It has no atomics either. The post itself is refused. */
static void posts_what_a_persona_lacks(struct end *a, struct end *b)
{
	struct ibv_sge sge = { .addr = (uintptr_t)a->buf, .length = 8, .lkey = a->mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
		.wr.atomic = { .remote_addr = (uintptr_t)b->buf, .rkey = b->mr->rkey } }, *bad;
	if (wrong)
		EQ(ibv_post_send(a->qp, &wr, &bad), EOPNOTSUPP);
}

/* The device plays one with small limits. All queue pairs are asked for in one place. */
static void beyond_limits_of_a_persona(struct end *a, struct end *b)
{
	struct ibv_qp_cap caps[] = {
		{ .max_send_wr = 16 + wrong, .max_send_sge = 1 },
		{ .max_send_wr = 1, .max_send_sge = 1, .max_recv_wr = 16 + wrong },
		{ .max_send_wr = 1, .max_send_sge = 3 + wrong },
		{ .max_send_wr = 1, .max_send_sge = 1, .max_recv_sge = 3 + wrong },
		{ .max_send_wr = 1, .max_send_sge = 1, .max_inline_data = 100 + wrong },
	};
	for (size_t n = 0; n < sizeof caps / sizeof *caps; n++) {
		struct ibv_qp_init_attr init = { .send_cq = a->cq, .recv_cq = a->cq, .cap = caps[n], .qp_type = IBV_QPT_RC };
		struct ibv_qp *qp = ibv_create_qp(a->mr->pd, &init);
		TRUE(wrong ? !qp && errno == EINVAL : qp != NULL);
		if (qp)
			OK(ibv_destroy_qp(qp));
	}
	struct ibv_cq *cq = ibv_create_cq(a->cq->context, 64 + wrong, NULL, NULL, 0);
	TRUE(wrong ? !cq && errno == EINVAL : cq != NULL);
	if (cq)
		OK(ibv_destroy_cq(cq));
	struct ibv_srq_init_attr sizes[] = { { .attr = { .max_wr = 10 + wrong, .max_sge = 1 } },
		{ .attr = { .max_wr = 1, .max_sge = 2 + wrong } } };
	for (size_t n = 0; n < 2; n++) {
		struct ibv_srq *srq = ibv_create_srq(a->mr->pd, &sizes[n]);
		TRUE(wrong ? !srq && errno == EINVAL : srq != NULL);
		if (srq)
			OK(ibv_destroy_srq(srq));
	}
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .max_rd_atomic = 5 + wrong };
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	OK(ibv_modify_qp(a->qp, &reset, IBV_QP_STATE));
	to_init(a->qp), to_rtr(a->qp, b->qp->qp_num);
	EQ(ibv_modify_qp(a->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
		IBV_QP_MAX_QP_RD_ATOMIC), wrong ? EINVAL : 0);
}

static void leak(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_cq *cq = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	TRUE(cq != NULL);
	if (!wrong)
		OK(ibv_destroy_cq(cq));
}

/* More than there are reports of one place. */
static void leaks_of_five_places(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_cq *cqs[5];
	cqs[0] = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	cqs[1] = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	cqs[2] = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	cqs[3] = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	cqs[4] = ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
	TRUE(cqs[0] && cqs[1] && cqs[2] && cqs[3] && cqs[4]);
}

/* Many from one place, which are reported three times. Then one from each of 25 places. */
static void leaks_of_many_places(struct end *a, struct end *b)
{
	(void)b;
	int made = 0;
	for (int n = 0; n < 30; n++)
		made += !!ibv_create_cq(a->cq->context, 8, NULL, NULL, 0);
#define ONE made += !!ibv_create_cq(a->cq->context, 8, NULL, NULL, 0)
#define FIVE ONE, ONE, ONE, ONE, ONE
	FIVE, FIVE, FIVE, FIVE, FIVE;
	TRUE(made == 55);
}

/* The connection manager keeps a protection domain of its own. */
static void leak_beside_the_connection_manager(struct end *a, struct end *b)
{
	(void)b;
	struct ibv_context **list = rdma_get_devices(NULL);
	TRUE(list);
	rdma_free_devices(list);
	if (wrong)
		TRUE(ibv_alloc_pd(a->cq->context));
}

int main(int argc, char **argv)
{
	TRUE(argc == 4);
	wrong = !strcmp(argv[2], "wrong");
	extended = !strcmp(argv[3], "extended");
	static const struct {
		const char *name;
		enum ibv_qp_type type;
		void (*run)(struct end *a, struct end *b);
	} all[] = {
		{ "qp-destroyed-with-work", IBV_QPT_RC, qp_destroyed_with_work },
		{ "mr-deregistered-with-work", IBV_QPT_RC, mr_deregistered_with_work },
		{ "ah-destroyed-with-work", IBV_QPT_UD, ah_destroyed_with_work },
		{ "buffer-changed", IBV_QPT_RC, buffer_changed },
		{ "ud-receive-without-grh", IBV_QPT_UD, ud_receive_without_grh },
		{ "inline-too-long", IBV_QPT_RC, inline_too_long },
		{ "send-queue-unsignaled", IBV_QPT_RC, send_queue_unsignaled },
		{ "ended-in-use", IBV_QPT_RC, ended_in_use },
		{ "destroyed-in-a-group", IBV_QPT_UD, destroyed_in_a_group },
		{ "destroyed-in-a-joined-group", IBV_QPT_UD, destroyed_in_a_joined_group },
		{ "ended-by-a-forked-child", IBV_QPT_RC, ended_by_a_forked_child },
		{ "uc-without-receive", IBV_QPT_UC, uc_without_receive },
		{ "uc-receive-too-small", IBV_QPT_UC, uc_receive_too_small },
		{ "uc-without-right", IBV_QPT_UC, uc_without_right },
		{ "write-without-right", IBV_QPT_RC, write_without_right },
		{ "unacknowledged-event", IBV_QPT_RC, unacknowledged_event },
		{ "cq-too-small", IBV_QPT_RC, cq_too_small },
		{ "cq-overrun", IBV_QPT_RC, cq_overrun },
		{ "cq-polled-by-two-threads", IBV_QPT_RC, cq_polled_by_two_threads },
		{ "cq-resized-by-two-threads", IBV_QPT_RC, resized_by_two_threads },
		{ "cq-notified-by-two-threads", IBV_QPT_RC, notified_by_two_threads },
		{ "cq-read-on-by-two-threads", IBV_QPT_RC, read_on_by_two_threads },
		{ "lkey-used-as-rkey", IBV_QPT_RC, lkey_used_as_rkey },
		{ "rights-too-weak", IBV_QPT_RC, rights_too_weak },
		{ "pd-mismatch", IBV_QPT_RC, pd_mismatch },
		{ "receive-too-small", IBV_QPT_RC, receive_too_small },
		{ "receive-not-posted", IBV_QPT_RC, receive_not_posted },
		{ "read-without-fence", IBV_QPT_RC, read_without_fence },
		{ "inline-read-without-fence", IBV_QPT_RC, inline_read_without_fence },
		{ "memory-beyond-memlock", IBV_QPT_RC, memory_beyond_memlock },
		{ "srq-last-wqe", IBV_QPT_RC, srq_last_wqe },
		{ "use-after-destroy", IBV_QPT_RC, use_after_destroy },
		{ "posted-from-forked-child", IBV_QPT_RC, posted_from_forked_child },
		{ "failed-wc-opcode", IBV_QPT_RC, failed_wc_opcode },
		{ "qkey-mismatch", IBV_QPT_UD, qkey_mismatch },
		{ "datagram-without-receive", IBV_QPT_UD, datagram_without_receive },
		{ "datagram-too-long", IBV_QPT_UD, datagram_too_long },
		{ "waits-for-a-datagram", IBV_QPT_UD, waits_for_a_datagram },
		{ "leaves-a-lost-datagram", IBV_QPT_UD, leaves_a_lost_datagram },
		{ "pkey-mismatch", IBV_QPT_UD, pkey_mismatch },
		{ "ends-differ", IBV_QPT_RC, ends_differ },
		{ "ends-differ-in-psn", IBV_QPT_RC, ends_differ_in_psn },
		{ "ends-differ-in-mtu", IBV_QPT_RC, ends_differ_in_mtu },
		{ "ends-differ-in-numbers", IBV_QPT_RC, ends_differ_in_numbers },
		{ "refused-by-persona", IBV_QPT_RC, refused_by_persona },
		{ "posts-what-a-persona-lacks", IBV_QPT_RC, posts_what_a_persona_lacks },
		{ "beyond-limits-of-a-persona", IBV_QPT_RC, beyond_limits_of_a_persona },
		{ "leak", IBV_QPT_RC, leak },
		{ "extended-calls-out-of-order", IBV_QPT_RC, extended_calls_out_of_order },
		{ "rows-not-ended", IBV_QPT_RC, rows_not_ended },
		{ "calls-within-rows", IBV_QPT_RC, calls_within_rows },
		{ "fields-without-completion", IBV_QPT_RC, fields_without_completion },
		{ "sends-before-a-bind", IBV_QPT_RC, sends_before_a_bind },
		{ "more-than-fits", IBV_QPT_RC, more_than_fits },
		{ "requests-of-one-number", IBV_QPT_RC, requests_of_one_number },
		{ "receives-of-two", IBV_QPT_RC, receives_of_two },
		{ "completions-that-are-lost", IBV_QPT_RC, completions_that_are_lost },
		{ "ended-before-a-poll", IBV_QPT_RC, ended_before_a_poll },
		{ "received-before-a-poll", IBV_QPT_RC, received_before_a_poll },
		{ "changed-with-work", IBV_QPT_RC, changed_with_work },
		{ "context-closed-in-use", IBV_QPT_RC, context_closed_in_use },
		{ "domains-ended-in-use", IBV_QPT_RC, domains_ended_in_use },
		{ "parts-ended-in-use", IBV_QPT_RC, parts_ended_in_use },
		{ "domains-left", IBV_QPT_RC, domains_left },
		{ "identifier-left", IBV_QPT_RC, identifier_left },
		{ "channel-destroyed-in-use", IBV_QPT_RC, channel_destroyed_in_use },
		{ "unacknowledged-event-of-an-identifier", IBV_QPT_RC, unacknowledged_event_of_an_identifier },
		{ "refused-and-then-waits", IBV_QPT_RC, refused_and_then_waits },
		{ "acknowledged-too-often", IBV_QPT_RC, acknowledged_too_often },
		{ "leaks-of-five-places", IBV_QPT_RC, leaks_of_five_places },
		{ "leaks-of-many-places", IBV_QPT_RC, leaks_of_many_places },
		{ "ends-at-its-first-error", IBV_QPT_RC, ends_at_its_first_error },
		{ "leak-beside-the-connection-manager", IBV_QPT_RC, leak_beside_the_connection_manager },
	};
	if (!strcmp(argv[1], "forks-first"))
		return forks_first();
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	for (size_t n = 0; n < sizeof all / sizeof *all; n++) {
		if (strcmp(all[n].name, argv[1]))
			continue;
		struct end a = make(pd, all[n].type), b = make(pd, all[n].type);
		connect_ends(&a, &b);
		all[n].run(&a, &b);
		free_end(&a), free_end(&b);
		OK(ibv_dealloc_pd(pd));
		OK(ibv_close_device(ctx));
		return result;
	}
	return 2;
}
