/* An XRC domain that processes share by a file. main() is the script; each process does one thing at a time for it. */
#include "check.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum what { OPEN, XRCD, SRQ, RECV, POLL, NONE, TARGET, CONNECT, OPEN_QP, QUERY, ERROR, DESTROY, INITIATOR, SEND, STREAM, EVENT, NO_EVENT,
	CLOSE, FREE_SRQ, CELL, RATE, ACCESS, REOPEN };

/* An order, with its numbers, and the answer. */
struct order {
	enum what what;
	int64_t n[6];
	char path[64];
};

struct answer {
	int error;
	int64_t n[5];
};

enum { SIZE = 1 << 16 };

/* What a process has. */
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_xrcd *xrcd;
static struct ibv_srq *srq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static char *buf;

static int file(const char *path, int64_t mode)
{
	int fd = open(path, (int)mode, 0600);
	TRUE(fd >= 0);
	return fd;
}

static void join_target(uint32_t dest)
{
	to_init(qp);
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = dest,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 1, .ah_attr = { .is_global = 1, .port_num = 1 } };
	a.ah_attr.grh.dgid = own_gid(ctx);
	a.ah_attr.grh.hop_limit = 64;
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 4 };
	OK(ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					 IBV_QP_MAX_QP_RD_ATOMIC));
}

static void send_one(const int64_t *n, uint64_t id)
{
	bool reads = n[0] == IBV_WR_RDMA_READ || n[0] == IBV_WR_ATOMIC_FETCH_AND_ADD;
	struct ibv_sge sge = { .addr = (uintptr_t)buf + (reads ? SIZE / 2 : 0), .length = (uint32_t)n[2], .lkey = mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = (enum ibv_wr_opcode)n[0],
		.imm_data = htobe32(0x1234), .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.qp_type.xrc.remote_srqn = (uint32_t)n[1];
	if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD)
		wr.wr.atomic.remote_addr = (uint64_t)n[3], wr.wr.atomic.rkey = (uint32_t)n[4], wr.wr.atomic.compare_add = 1;
	else
		wr.wr.rdma.remote_addr = (uint64_t)n[3], wr.wr.rdma.rkey = (uint32_t)n[4];
	OK(ibv_post_send(qp, &wr, &bad));
}

static void take_recv(uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		struct ibv_sge sge = { .addr = (uintptr_t)buf + SIZE / 2, .length = SIZE / 2, .lkey = mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = i, .sg_list = &sge, .num_sge = 1 }, *bad;
		OK(ibv_post_srq_recv(srq, &wr, &bad));
	}
}

/* Messages in turn to two SRQs, several on their way. */
static void stream(const int64_t *n)
{
	int64_t sent = 0, done = 0, count = n[3];
	while (done < count) {
		while (sent < count && sent - done < 8) {
			int64_t each[6] = { IBV_WR_SEND_WITH_IMM, sent % n[4] ? n[1] : n[0], n[2] };
			send_one(each, (uint64_t)sent++);
		}
		struct ibv_wc wc = poll_one(cq);
		TRUE(wc.status == IBV_WC_SUCCESS && (int64_t)wc.wr_id == done);
		done++;
	}
}

static struct answer event(void)
{
	struct answer a = { 0 };
	struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
	EQ(poll(&p, 1, 10000), 1);
	struct ibv_async_event e;
	OK(ibv_get_async_event(ctx, &e));
	a.n[0] = e.event_type;
	a.n[1] = e.element.qp == qp;
	ibv_ack_async_event(&e);
	return a;
}

static struct ibv_qp *open_target(uint32_t number)
{
	struct ibv_qp_open_attr i = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE |
		IBV_QP_OPEN_ATTR_CONTEXT, .qp_num = number, .xrcd = xrcd, .qp_type = IBV_QPT_XRC_RECV };
	return ibv_open_qp(ctx, &i);
}

/* Opens a target, uses it and closes it, often. */
static void *reopen(void *number)
{
	for (int i = 0; i < 300; i++) {
		struct ibv_qp *opened = open_target((uint32_t)(uintptr_t)number);
		struct ibv_qp_attr attr;
		struct ibv_qp_init_attr init;
		TRUE(opened != NULL);
		OK(ibv_query_qp(opened, &attr, IBV_QP_STATE, &init));
		OK(ibv_destroy_qp(opened));
	}
	return NULL;
}

static struct answer obey(const struct order *o)
{
	struct answer a = { 0 };
	struct ibv_wc wc;
	errno = 0;
	switch (o->what) {
	case OPEN:
		ctx = open_device();
		pd = ibv_alloc_pd(ctx);
		cq = ibv_create_cq(ctx, 256, NULL, NULL, 0);
		buf = calloc(1, SIZE);
		mr = ibv_reg_mr(pd, buf, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
						       IBV_ACCESS_REMOTE_ATOMIC);
		TRUE(ctx && pd && cq && mr);
		memset(buf, (int)o->n[0], SIZE / 2);
		a.n[0] = (intptr_t)buf, a.n[1] = mr->rkey;
		break;
	case XRCD: {
		int fd = file(o->path, o->n[1]);
		struct ibv_xrcd_init_attr i = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd,
			.oflags = (int)o->n[0] };
		xrcd = ibv_open_xrcd(ctx, &i);
		a.error = xrcd ? 0 : errno;
		/* It needs the descriptor no more. */
		close(fd);
		break;
	}
	case CLOSE:
		a.error = ibv_close_xrcd(xrcd);
		break;
	case SRQ: {
		struct ibv_srq_init_attr_ex i = { .attr = { .max_wr = 256, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
			.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
			.pd = pd, .xrcd = xrcd, .cq = cq };
		srq = ibv_create_srq_ex(ctx, &i);
		TRUE(srq != NULL);
		uint32_t number;
		OK(ibv_get_srq_num(srq, &number));
		a.n[0] = number;
		break;
	}
	case FREE_SRQ:
		a.error = ibv_destroy_srq(srq);
		break;
	case RECV:
		take_recv((uint64_t)o->n[0]);
		break;
	case POLL: {
		int64_t count = 0, in_order = 1;
		do {
			wc = poll_one(cq);
			in_order &= (int64_t)wc.wr_id == count % (o->n[1] ? o->n[1] : 1 << 30);
		} while (wc.status == IBV_WC_SUCCESS && ++count < o->n[0]);
		a = (struct answer){ wc.status, { wc.opcode, wc.qp_num, wc.byte_len, buf[SIZE / 2], in_order } };
		break;
	}
	case NONE:
		EQ(ibv_poll_cq(cq, 1, &wc), 0);
		break;
	case CELL:
		memcpy(&a.n[0], buf + o->n[0], 8);
		break;
	case TARGET: {
		struct ibv_qp_init_attr_ex i = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd };
		qp = ibv_create_qp_ex(ctx, &i);
		TRUE(qp != NULL);
		a.n[0] = qp->qp_num;
		break;
	}
	case INITIATOR: {
		struct ibv_qp_init_attr_ex i = { .qp_type = IBV_QPT_XRC_SEND, .send_cq = cq, .pd = pd,
			.comp_mask = IBV_QP_INIT_ATTR_PD, .cap = { .max_send_wr = 16, .max_send_sge = 1 } };
		qp = ibv_create_qp_ex(ctx, &i);
		TRUE(qp != NULL);
		a.n[0] = qp->qp_num;
		break;
	}
	case CONNECT:
		join_target((uint32_t)o->n[0]);
		break;
	case OPEN_QP: {
		struct ibv_qp *opened = open_target((uint32_t)o->n[0]);
		a.error = opened ? 0 : errno;
		qp = opened ? opened : qp;
		break;
	}
	case QUERY: {
		struct ibv_qp_attr attr;
		struct ibv_qp_init_attr init;
		a.error = ibv_query_qp(qp, &attr, IBV_QP_STATE, &init);
		a.n[0] = attr.qp_state, a.n[1] = attr.dest_qp_num, a.n[2] = init.qp_type, a.n[3] = attr.path_mtu;
		break;
	}
	case ERROR: {
		struct ibv_qp_attr attr = { .qp_state = (enum ibv_qp_state)o->n[0] };
		a.error = ibv_modify_qp(qp, &attr, IBV_QP_STATE);
		break;
	}
	case DESTROY:
		a.error = ibv_destroy_qp(qp);
		break;
	case SEND:
		send_one(o->n, 7);
		wc = poll_one(cq);
		a.error = wc.status, a.n[0] = buf[0];
		break;
	case STREAM:
		stream(o->n);
		break;
	case RATE: {
		struct ibv_qp_rate_limit_attr limit = { .rate_limit = (uint32_t)o->n[0] };
		a.error = ibv_modify_qp_rate_limit(qp, &limit);
		break;
	}
	case ACCESS: {
		struct ibv_qp_attr attr = { .qp_access_flags = (unsigned)o->n[0] };
		a.error = ibv_modify_qp(qp, &attr, IBV_QP_ACCESS_FLAGS);
		break;
	}
	case REOPEN: {
		pthread_t other;
		OK(pthread_create(&other, NULL, reopen, (void *)(uintptr_t)o->n[0]));
		reopen((void *)(uintptr_t)o->n[0]);
		OK(pthread_join(other, NULL));
		break;
	}
	case EVENT:
		return event();
	case NO_EVENT: {
		struct pollfd p = { .fd = ctx->async_fd, .events = POLLIN };
		a.error = poll(&p, 1, 50);
		break;
	}
	}
	return a;
}

struct process {
	pid_t pid;
	int fd;
	int64_t addr, rkey, srqn;
};

static struct process begin(char pattern);

static void order(const struct process *p, enum what what, const int64_t n[6], const char *path)
{
	struct order o = { .what = what };
	if (n)
		memcpy(o.n, n, sizeof o.n);
	if (path)
		strcpy(o.path, path);
	EQ(write(p->fd, &o, sizeof o), sizeof o);
}

static struct answer answer(const struct process *p)
{
	struct answer a;
	EQ(read(p->fd, &a, sizeof a), sizeof a);
	return a;
}

#define N(...) ((const int64_t[6]){ __VA_ARGS__ })

static struct answer ask(const struct process *p, enum what what, const int64_t n[6], const char *path)
{
	order(p, what, n, path);
	return answer(p);
}

#define DO(p, what, ...) ask(&(p), what, N(__VA_ARGS__), NULL)

static struct process begin(char pattern)
{
	int pair[2];
	OK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
	struct process p = { .pid = fork(), .fd = pair[0] };
	TRUE(p.pid >= 0);
	if (p.pid == 0) {
		struct order o;
		close(pair[0]);
		while (read(pair[1], &o, sizeof o) == sizeof o) {
			struct answer a = obey(&o);
			EQ(write(pair[1], &a, sizeof a), sizeof a);
		}
		exit(0);
	}
	close(pair[1]);
	struct answer a = DO(p, OPEN, pattern);
	p.addr = a.n[0], p.rkey = a.n[1];
	return p;
}

/* Ends: 0 by itself, or by a signal. */
static void end(struct process *p, int signal)
{
	if (signal)
		OK(kill(p->pid, signal));
	/* Younger processes have it as well. */
	shutdown(p->fd, SHUT_RDWR);
	close(p->fd);
	int status;
	EQ(waitpid(p->pid, &status, 0), p->pid);
	TRUE(signal ? WIFSIGNALED(status) : status == 0);
}

static int open_domain(const struct process *p, const char *path, int oflags, int mode)
{
	return ask(p, XRCD, N(oflags, mode), path).error;
}

static void domains(const char *path, const char *other)
{
	struct process a = begin('a'), b = begin('b');
	EQ(open_domain(&a, path, 0, O_RDONLY | O_CREAT), EAGAIN);
	EQ(open_domain(&a, path, O_CREAT | O_EXCL, O_RDONLY), 0);
	/* It is there for all processes, by whatever name and however the file is open. */
	EQ(open_domain(&b, path, O_CREAT | O_EXCL, O_RDWR), EINVAL);
	OK(link(path, other));
	EQ(open_domain(&b, other, 0, O_RDWR), 0);
	OK(DO(a, CLOSE).error);
	EQ(open_domain(&a, path, O_CREAT | O_EXCL, O_RDONLY), EINVAL);
	OK(DO(b, CLOSE).error);
	EQ(open_domain(&a, path, 0, O_RDONLY), EAGAIN);
	/* It ends with the last process, however that ends. */
	OK(open_domain(&a, path, O_CREAT, O_RDONLY));
	end(&a, SIGKILL);
	EQ(open_domain(&b, path, 0, O_RDONLY), EAGAIN);
	/* Another file under the same name is another domain. */
	OK(open_domain(&b, path, O_CREAT, O_RDONLY));
	struct process c = begin('c');
	OK(unlink(path));
	EQ(open_domain(&c, path, 0, O_RDONLY | O_CREAT), EAGAIN);
	OK(open_domain(&c, other, 0, O_RDONLY));
	OK(unlink(other));
	end(&b, 0), end(&c, 0);
}

/* A process with the target, with an SRQ of its own and the domain; two with an SRQ each; one that sends. */
struct world {
	struct process home, a, b, sender;
	int64_t target;
};

static struct world make_world(const char *path)
{
	struct world w = { begin('h'), begin('a'), begin('b'), begin('s') };
	struct process *with[3] = { &w.home, &w.a, &w.b };
	for (int i = 0; i < 3; i++) {
		OK(open_domain(with[i], path, O_CREAT, O_RDWR | O_CREAT));
		with[i]->srqn = ask(with[i], SRQ, N(0), NULL).n[0];
	}
	w.target = DO(w.home, TARGET).n[0];
	int64_t initiator = DO(w.sender, INITIATOR).n[0];
	DO(w.home, CONNECT, initiator);
	DO(w.sender, CONNECT, w.target);
	return w;
}

static void free_world(struct world *w)
{
	end(&w->home, 0), end(&w->a, 0), end(&w->b, 0), end(&w->sender, 0);
}

/* One message of this length arrives where it is for. */
static void message(struct world *w, struct process *to, int64_t len)
{
	DO(*to, RECV, 1);
	OK(DO(w->sender, SEND, IBV_WR_SEND_WITH_IMM, to->srqn, len).error);
	struct answer a = DO(*to, POLL, 1);
	TRUE(a.error == 0 && a.n[0] == IBV_WC_RECV && a.n[1] == w->target && a.n[2] == len && a.n[3] == 's');
}

static void traffic(const char *path)
{
	struct world w = make_world(path);
	for (int i = 0; i < 3; i++) {
		message(&w, &w.home, 10), message(&w, &w.a, 20000), message(&w, &w.b, 1), message(&w, &w.b, 4096);
		message(&w, &w.a, 0 + i);
	}
	/* One-sided requests are about the memory of the process whose SRQ they name. */
	struct process *all[3] = { &w.a, &w.home, &w.b };
	for (int i = 0; i < 3; i++) {
		struct process *p = all[i];
		OK(DO(w.sender, SEND, IBV_WR_RDMA_WRITE, p->srqn, 9000, p->addr + SIZE / 2, p->rkey).error);
		EQ(DO(*p, CELL, SIZE / 2 + 8992).n[0], 0x7373737373737373);
		OK(DO(w.sender, SEND, IBV_WR_ATOMIC_FETCH_AND_ADD, p->srqn, 8, p->addr + SIZE / 2, p->rkey).error);
		EQ(DO(*p, CELL, SIZE / 2).n[0], 0x7373737373737374);
		OK(DO(w.sender, SEND, IBV_WR_RDMA_READ, p->srqn, 9000, p->addr, p->rkey).error);
		EQ(DO(w.sender, CELL, SIZE / 2 + 8992).n[0] & 0xff, "ahb"[i]);
		OK(DO(w.sender, SEND, IBV_WR_RDMA_READ, p->srqn, 1, p->addr + SIZE / 2 + 64, p->rkey).error);
		DO(*p, RECV, 1);
		OK(DO(w.sender, SEND, IBV_WR_RDMA_WRITE_WITH_IMM, p->srqn, 100, p->addr + SIZE / 2, p->rkey).error);
		EQ(DO(*p, POLL, 1).n[0], IBV_WC_RECV_RDMA_WITH_IMM);
	}
	/* A receive that comes late is waited for. */
	order(&w.sender, SEND, N(IBV_WR_SEND_WITH_IMM, w.a.srqn, 100), NULL);
	usleep(20000);
	DO(w.a, RECV, 1);
	OK(answer(&w.sender).error);
	OK(DO(w.a, POLL, 1).error);
	/* Many on their way, each for another process than the one before. */
	DO(w.a, RECV, 200), DO(w.b, RECV, 200);
	order(&w.sender, STREAM, N(w.a.srqn, w.b.srqn, 3000, 400, 2), NULL);
	TRUE(DO(w.a, POLL, 200).n[4] && DO(w.b, POLL, 200).n[4]);
	answer(&w.sender);
	/* And in runs. */
	DO(w.a, RECV, 100), DO(w.home, RECV, 100);
	order(&w.sender, STREAM, N(w.home.srqn, w.a.srqn, 3000, 110, 11), NULL);
	TRUE(DO(w.home, POLL, 10).n[4] && DO(w.a, POLL, 100).n[4]);
	answer(&w.sender);
	free_world(&w);
}

/* Memory of one process through the SRQ of another. */
static void faults(const char *path)
{
	for (int i = 0; i < 2; i++) {
		struct world w = make_world(path);
		message(&w, &w.a, 100);
		struct process *other = i ? &w.home : &w.b;
		EQ(DO(w.sender, SEND, IBV_WR_RDMA_READ, w.a.srqn, 8, other->addr, other->rkey ^ (i ? 0 : 1)).error, IBV_WC_REM_ACCESS_ERR);
		struct answer e = DO(w.home, EVENT);
		TRUE(e.n[0] == IBV_EVENT_QP_ACCESS_ERR && e.n[1]);
		EQ(DO(w.home, EVENT).n[0], IBV_EVENT_QP_LAST_WQE_REACHED);
		EQ(DO(w.home, QUERY).n[0], IBV_QPS_ERR);
		EQ(DO(w.home, NO_EVENT).error, 0);
		free_world(&w);
	}
	/* An SRQ that is destroyed, and one whose process has ended; what others do goes on until one is named. */
	for (int i = 0; i < 3; i++) {
		struct world w = make_world(path);
		message(&w, &w.a, 5000);
		if (i == 0)
			OK(DO(w.a, FREE_SRQ).error);
		else
			end(&w.a, i == 1 ? SIGKILL : 0);
		message(&w, &w.b, 5000), message(&w, &w.home, 100), message(&w, &w.b, 100);
		EQ(DO(w.sender, SEND, IBV_WR_SEND_WITH_IMM, w.a.srqn, 100).error, IBV_WC_REM_ACCESS_ERR);
		EQ(DO(w.home, EVENT).n[0], IBV_EVENT_QP_ACCESS_ERR);
		if (i)
			w.a = begin('a');
		free_world(&w);
	}
	/* The one of another domain is none. */
	struct world w = make_world(path);
	char other[64];
	snprintf(other, sizeof other, "%s.other", path);
	struct process c = begin('c');
	OK(open_domain(&c, other, O_CREAT, O_RDWR | O_CREAT));
	c.srqn = DO(c, SRQ).n[0];
	DO(c, RECV, 1);
	EQ(DO(w.sender, SEND, IBV_WR_SEND_WITH_IMM, c.srqn, 100).error, IBV_WC_REM_ACCESS_ERR);
	DO(c, NONE);
	OK(unlink(other));
	end(&c, 0);
	free_world(&w);
}

/* Handles of a target in other processes. */
static void opened(const char *path)
{
	struct world w = make_world(path);
	EQ(DO(w.a, OPEN_QP, w.target ^ 1).error, EINVAL);
	OK(DO(w.a, OPEN_QP, w.target).error);
	OK(DO(w.b, OPEN_QP, w.target).error);
	struct answer q = DO(w.a, QUERY);
	TRUE(q.error == 0 && q.n[0] == IBV_QPS_RTS && q.n[2] == IBV_QPT_XRC_RECV && q.n[3] == IBV_MTU_1024);
	EQ(DO(w.a, CLOSE).error, EBUSY);
	message(&w, &w.a, 100);
	/* Who made it gives it up: it stays. */
	OK(DO(w.home, DESTROY).error);
	EQ(DO(w.home, QUERY).error, EINVAL);
	message(&w, &w.a, 100), message(&w, &w.b, 100), message(&w, &w.home, 9000);
	OK(DO(w.b, DESTROY).error);
	message(&w, &w.a, 100);
	/* All who have it open hear of it. */
	OK(DO(w.b, OPEN_QP, w.target).error);
	EQ(DO(w.sender, SEND, IBV_WR_SEND_WITH_IMM, w.b.srqn ^ 0x8000, 100).error, IBV_WC_REM_ACCESS_ERR);
	struct process *both[2] = { &w.a, &w.b };
	for (int i = 0; i < 2; i++) {
		struct answer e = ask(both[i], EVENT, N(0), NULL);
		TRUE(e.n[0] == IBV_EVENT_QP_ACCESS_ERR && e.n[1]);
		EQ(ask(both[i], EVENT, N(0), NULL).n[0], IBV_EVENT_QP_LAST_WQE_REACHED);
		EQ(ask(both[i], QUERY, N(0), NULL).n[0], IBV_QPS_ERR);
	}
	EQ(DO(w.home, NO_EVENT).error, 0);
	/* Any of them may modify it. */
	EQ(DO(w.a, ERROR, IBV_QPS_RTS).error, EINVAL);
	OK(DO(w.a, ERROR, IBV_QPS_RESET).error);
	EQ(DO(w.b, QUERY).n[0], IBV_QPS_RESET);
	/* The last one ends it. */
	OK(DO(w.a, DESTROY).error);
	OK(DO(w.b, DESTROY).error);
	EQ(DO(w.a, OPEN_QP, w.target).error, EINVAL);
	EQ(DO(w.b, DESTROY).error, EINVAL);
	free_world(&w);
}

/* The process that made a target ends, by itself or not, and the target with it. Who has it open hears of that; the domain stays. */
static void ended(const char *path, int signal, int borrowed)
{
	struct world w = make_world(path);
	OK(DO(w.a, OPEN_QP, w.target).error);
	message(&w, &w.home, 100), message(&w, borrowed ? &w.a : &w.home, 3000);
	end(&w.home, signal);
	EQ(DO(w.a, EVENT).n[0], IBV_EVENT_QP_FATAL);
	EQ(DO(w.a, QUERY).error, EINVAL);
	EQ(DO(w.sender, SEND, IBV_WR_SEND_WITH_IMM, w.a.srqn, 100).error, IBV_WC_RETRY_EXC_ERR);
	EQ(DO(w.b, OPEN_QP, w.target).error, EINVAL);
	DO(w.a, DESTROY);
	w.home = begin('c');
	OK(open_domain(&w.home, path, 0, O_RDWR));
	free_world(&w);
}

/* Threads of a process open and close the same target: its process knows whether it is open there. */
static void reopened(const char *path)
{
	struct world w = make_world(path);
	DO(w.a, REOPEN, w.target);
	OK(DO(w.a, OPEN_QP, w.target).error);
	OK(DO(w.a, QUERY).error);
	free_world(&w);
}

/* Rights that are taken away while the responder is elsewhere, in the midst of a message, count for the next. */
static void modified_while_lent(const char *path)
{
	struct world w = make_world(path);
	const int64_t len = 30000;
	message(&w, &w.a, 100);
	OK(DO(w.sender, RATE, 800).error);
	order(&w.sender, SEND, N(IBV_WR_RDMA_WRITE, w.a.srqn, len, w.a.addr + SIZE / 2, w.a.rkey), NULL);
	usleep(100000);
	OK(DO(w.home, ACCESS, 0).error);
	OK(answer(&w.sender).error);
	OK(DO(w.sender, RATE, 0).error);
	EQ(DO(w.sender, SEND, IBV_WR_RDMA_WRITE, w.a.srqn, 8, w.a.addr + SIZE / 2, w.a.rkey).error, IBV_WC_REM_INV_REQ_ERR);
	free_world(&w);
}

int main(void)
{
	char path[40], other[64];
	snprintf(path, sizeof path, "/tmp/xrc_shared.%d", getpid());
	snprintf(other, sizeof other, "%s.link", path);
	domains(path, other);
	traffic(path);
	faults(path);
	opened(path);
	reopened(path);
	modified_while_lent(path);
	for (int borrowed = 0; borrowed < 2; borrowed++)
		ended(path, 0, borrowed), ended(path, SIGKILL, borrowed);
	unlink(path);
	return 0;
}
