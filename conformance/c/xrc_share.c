/*
 * An XRC domain that processes share by a file, one part a process, for each of which may end while the others work:
 *
 *   xrc_share initiator PORT                            waits for the target on TCP, then sends to the holder's SRQ
 *   xrc_share holder FILE                               has an SRQ of the domain, and the memory that is written
 *   xrc_share target FILE PORT HOST SRQN ADDR RKEY      has the target queue pair; dials the initiator
 *   xrc_share opener FILE QPN                           has the same target open
 *
 * The initiator does SENDs, WRITEs (read back) and fetch-and-adds in turn; each message has its number. Whatever happens to
 * the target's process while another one has it open, every message arrives once, in order, and every addition is done
 * once. Ends with 3 if its queue pair failed with IBV_WC_RETRY_EXC_ERR or IBV_WC_REM_ACCESS_ERR within the time that
 * exchange.c names, with 4 if later, with 1 if anything was wrong; the others never end by themselves unless something was.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "waited.h"

/* An ACK timeout of 0.27 s, and 4 s until the retries run out: who goes on with a target may have to wait for a processor. */
enum { TIMEOUT = 16, RETRIES = 4, RECEIVES = 64, COUNTER = 0, PLACE = 4096, LENGTH = 5000, INBOX = 16384,
       SIZE = INBOX + RECEIVES * LENGTH };

struct endpoint {
	union ibv_gid gid;
	uint32_t qpn, srqn, rkey;
	uint64_t addr;
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static union ibv_gid gid;
static char *memory;
/* What was waited for processors, as of the last line of progress. */
static double waited;

static void die(int status, const char *format, ...)
{
	va_list list;
	va_start(list, format);
	vprintf(format, list);
	va_end(list);
	printf("\n");
	fflush(stdout);
	_exit(status);
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void say_progress(unsigned long done)
{
	static double next;
	static unsigned long before;
	if (now() < next)
		return;
	printf("at %.3f: %lu operations, %lu more\n", now(), done, done - before);
	before = done;
	waited = waited_for_processors();
	next = now() + 0.1;
}

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	if (!list || !list[0] || !(context = ibv_open_device(list[0])))
		die(1, "no device");
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 4 * RECEIVES, NULL, NULL, 0);
	memory = calloc(1, SIZE);
	mr = ibv_reg_mr(pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
						  IBV_ACCESS_REMOTE_ATOMIC);
	if (!pd || !cq || !mr || ibv_query_gid(context, 1, 0, &gid))
		die(1, "no objects: %s", strerror(errno));
}

static struct ibv_xrcd *open_domain(const char *path)
{
	struct ibv_xrcd_init_attr init = { .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .oflags = O_CREAT,
		.fd = open(path, O_RDWR | O_CREAT, 0600) };
	struct ibv_xrcd *xrcd = ibv_open_xrcd(context, &init);
	if (!xrcd)
		die(1, "no XRC domain: %s", strerror(errno));
	return xrcd;
}

static void modify(struct ibv_qp *qp, struct ibv_qp_attr attr, int mask)
{
	if (ibv_modify_qp(qp, &attr, mask | IBV_QP_STATE))
		die(1, "cannot modify a queue pair to state %d: %s", attr.qp_state, strerror(errno));
}

static void connect_qp(struct ibv_qp *qp, const struct endpoint *to)
{
	int target = qp->qp_type == IBV_QPT_XRC_RECV;
	modify(qp, (struct ibv_qp_attr){ .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_READ |
		       IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC },
	       IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = to->qpn,
		.max_dest_rd_atomic = 4, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = to->gid, .hop_limit = 64 } } };
	modify(qp, attr, IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				 (target ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = TIMEOUT, .retry_cnt = RETRIES, .rnr_retry = 7,
		.max_rd_atomic = 4 };
	modify(qp, attr, IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
				 (target ? 0 : IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void swap(int fd, const struct endpoint *mine, struct endpoint *theirs)
{
	if (send(fd, mine, sizeof *mine, MSG_NOSIGNAL) != sizeof *mine ||
	    recv(fd, theirs, sizeof *theirs, MSG_WAITALL) != sizeof *theirs)
		die(1, "the other end of TCP is gone");
}

/* Waits for the completion of the one request that is outstanding. */
static void complete(struct ibv_qp *qp, struct ibv_send_wr *wr, const struct endpoint *to)
{
	static const double bound = 4 * 4.096e-6 * (1 << TIMEOUT) * (RETRIES + 1) + 1;
	struct ibv_send_wr *bad;
	struct ibv_wc wc;
	double begin = now();
	wr->send_flags = IBV_SEND_SIGNALED;
	wr->num_sge = 1;
	wr->qp_type.xrc.remote_srqn = to->srqn;
	if (ibv_post_send(qp, wr, &bad))
		die(1, "cannot post");
	int n;
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		if (now() - begin > bound + 20)
			die(1, "neither completed nor failed");
	if (n < 0)
		die(1, "cannot poll");
	if (wc.status == IBV_WC_SUCCESS)
		return;
	int expected = wc.status == IBV_WC_RETRY_EXC_ERR || wc.status == IBV_WC_REM_ACCESS_ERR;
	double took = now() - begin, idle = waited_for_processors() - waited;
	die(!expected ? 1 : took - idle > bound ? 4 : 3, "opcode %d failed with %s after %.3f s, %.3f s waiting for processors, of %.3f s",
	    wr->opcode, ibv_wc_status_str(wc.status), took, idle, bound);
}

static void initiate(struct ibv_qp *qp, const struct endpoint *to)
{
	struct ibv_sge sge = { (uintptr_t)memory, LENGTH, mr->lkey };
	uint64_t sent = 0, added = 0, found;
	for (unsigned long done = 0;; done++) {
		struct ibv_send_wr wr = { .sg_list = &sge };
		wr.wr.rdma.remote_addr = to->addr + PLACE;
		wr.wr.rdma.rkey = to->rkey;
		switch (done % 3) {
		case 0:
			wr.opcode = IBV_WR_SEND;
			memcpy(memory, &sent, 8);
			sent++;
			sge.length = 8 + sent % 4000;
			complete(qp, &wr, to);
			break;
		case 1:
			wr.opcode = IBV_WR_RDMA_WRITE;
			memset(memory, (int)done, LENGTH);
			sge.length = LENGTH;
			complete(qp, &wr, to);
			memset(memory, ~(int)done, LENGTH);
			wr.opcode = IBV_WR_RDMA_READ;
			complete(qp, &wr, to);
			for (int i = 0; i < LENGTH; i++)
				if (memory[i] != (char)done)
					die(1, "wrong byte %d of WRITE %lu", i, done);
			break;
		default:
			wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
			wr.wr.atomic.remote_addr = to->addr + COUNTER;
			wr.wr.atomic.rkey = to->rkey;
			wr.wr.atomic.compare_add = 1;
			sge.length = 8;
			complete(qp, &wr, to);
			memcpy(&found, memory, 8);
			if (found != added)
				die(1, "addition %lu found %lu", added, found);
			added++;
		}
		say_progress(done);
	}
}

static void initiator(int port)
{
	struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
	int listener = socket(AF_INET6, SOCK_STREAM, 0), one = 1;
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_SEND, .send_cq = cq, .pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .cap = { .max_send_wr = 16, .max_send_sge = 1 } };
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	if (!qp || bind(listener, (struct sockaddr *)&any, sizeof any) || listen(listener, 1))
		die(1, "no queue pair or listener: %s", strerror(errno));
	struct endpoint mine = { .gid = gid, .qpn = qp->qp_num }, theirs;
	int fd = accept(listener, NULL, NULL);
	swap(fd, &mine, &theirs);
	connect_qp(qp, &theirs);
	/* The target is ready, and somebody else has it open. */
	char go;
	if (recv(fd, &go, 1, MSG_WAITALL) != 1)
		die(1, "the target ended early");
	printf("connected\n");
	initiate(qp, &theirs);
}

static void post_receive(struct ibv_srq *srq, uint64_t number)
{
	struct ibv_sge sge = { (uintptr_t)memory + INBOX + number * LENGTH, LENGTH, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = number, .sg_list = &sge, .num_sge = 1 }, *bad;
	if (ibv_post_srq_recv(srq, &wr, &bad))
		die(1, "cannot post a receive");
}

static void holder(const char *path)
{
	struct ibv_srq_init_attr_ex init = { .attr = { .max_wr = RECEIVES, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC, .pd = pd,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.xrcd = open_domain(path), .cq = cq };
	struct ibv_srq *srq = ibv_create_srq_ex(context, &init);
	uint32_t number;
	if (!srq || ibv_get_srq_num(srq, &number))
		die(1, "no SRQ: %s", strerror(errno));
	for (int i = 0; i < RECEIVES; i++)
		post_receive(srq, i);
	printf("holds %u %lu %u\n", number, (unsigned long)(uintptr_t)memory, mr->rkey);
	for (uint64_t next = 0;;) {
		struct ibv_wc wc;
		int n = ibv_poll_cq(cq, 1, &wc);
		say_progress(next);
		if (n == 0) {
			/* Others share the processors; one-sided requests are the device's own to serve. */
			usleep(500);
			continue;
		}
		uint64_t got;
		memcpy(&got, memory + INBOX + wc.wr_id * LENGTH, 8);
		if (n < 0 || wc.status != IBV_WC_SUCCESS)
			die(1, "a receive failed with %s", n < 0 ? "nothing" : ibv_wc_status_str(wc.status));
		if (got != next || wc.byte_len != 8 + (next + 1) % 4000)
			die(1, "message %lu of %u bytes in place of %lu", got, wc.byte_len, next);
		next++;
		post_receive(srq, wc.wr_id);
	}
}

static void target(char **argv)
{
	struct ibv_qp_init_attr_ex init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD,
		.xrcd = open_domain(argv[0]) };
	struct ibv_qp *qp = ibv_create_qp_ex(context, &init);
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = inet_addr(argv[2]) };
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (!qp || connect(fd, (struct sockaddr *)&to, sizeof to))
		die(1, "no target, or no initiator: %s", strerror(errno));
	struct endpoint theirs, mine = { .gid = gid, .qpn = qp->qp_num, .srqn = strtoul(argv[3], NULL, 10),
		.addr = strtoul(argv[4], NULL, 10), .rkey = strtoul(argv[5], NULL, 10) };
	swap(fd, &mine, &theirs);
	connect_qp(qp, &theirs);
	printf("target %u\n", qp->qp_num);
	/* Until somebody else has it open: then the runner makes a file. */
	char path[4096];
	snprintf(path, sizeof path, "%s.open", argv[0]);
	while (access(path, F_OK))
		usleep(1000);
	if (send(fd, "g", 1, MSG_NOSIGNAL) != 1)
		die(1, "the initiator is gone");
	printf("connected\n");
	for (;;)
		pause();
}

static void opener(char **argv)
{
	struct ibv_qp_open_attr attr = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE,
		.qp_num = strtoul(argv[1], NULL, 10), .xrcd = open_domain(argv[0]), .qp_type = IBV_QPT_XRC_RECV };
	if (!ibv_open_qp(context, &attr))
		die(1, "cannot open the target: %s", strerror(errno));
	printf("open\n");
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	open_device();
	const char *part = argc > 2 ? argv[1] : "";
	if (!strcmp(part, "initiator"))
		initiator(atoi(argv[2]));
	else if (!strcmp(part, "holder"))
		holder(argv[2]);
	else if (!strcmp(part, "target") && argc == 8)
		target(argv + 2);
	else if (!strcmp(part, "opener") && argc == 4)
		opener(argv + 2);
	die(1, "see the source for the arguments");
}
