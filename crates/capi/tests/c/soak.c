/*
 * Everything at once, for long: what a process does here it does again and again, so that its memory must not grow.
 *
 * soak serve PORT               answers connections of the CM (PORT) and rsockets (PORT + 1) until its input ends
 * soak work PORT SECONDS        asks such a process, and does all that one process does alone; SECONDS 0: until its input ends
 *
 * Every 1000th round of `work` prints a line.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rsocket.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check_line.h"

#define SIZE 65536
#define SENDS 4

static int port;

static double seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static struct sockaddr_in address(int at)
{
	return (struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons((uint16_t)at),
				     .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
}

static int input_ended(void)
{
	struct pollfd input = { .fd = 0, .events = POLLIN };
	char byte;
	return poll(&input, 1, 0) > 0 && read(0, &byte, 1) <= 0;
}

/* ---- the server: echoes what connections send, whatever becomes of those who ask */

struct connection {
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	uint8_t buffer[1024];
	/* Echoes whose completions have not been polled: they fill the send queue, whatever the client has of them. */
	int unfinished;
};

static void post_recv(struct connection *c)
{
	struct ibv_sge sge = { (uintptr_t)c->buffer, sizeof c->buffer, c->mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	CHECK(!ibv_post_recv(c->id->qp, &wr, &bad));
}

static void welcome(struct rdma_cm_id *id)
{
	struct connection *c = calloc(1, sizeof *c);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
					 .cap = { .max_send_wr = SENDS, .max_recv_wr = 4, .max_send_sge = 1,
						  .max_recv_sge = 1 } };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .rnr_retry_count = 7 };
	CHECK(c && !rdma_create_qp(id, NULL, &init));
	c->id = id;
	id->context = c;
	c->mr = ibv_reg_mr(id->pd, c->buffer, sizeof c->buffer, IBV_ACCESS_LOCAL_WRITE);
	CHECK(c->mr);
	post_recv(c);
	/* Who asked may have ended since. */
	rdma_accept(id, &param);
}

static void farewell(struct rdma_cm_id *id)
{
	struct connection *c = id->context;
	rdma_disconnect(id);
	rdma_destroy_qp(id);
	CHECK(!ibv_dereg_mr(c->mr) && !rdma_destroy_id(id));
	free(c);
}

static void echo(struct connection *c)
{
	struct ibv_wc wc;
	while (c->unfinished < SENDS && ibv_poll_cq(c->id->recv_cq, 1, &wc) > 0)
		if (wc.status == IBV_WC_SUCCESS) {
			struct ibv_sge sge = { (uintptr_t)c->buffer, wc.byte_len, c->mr->lkey };
			struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
			post_recv(c);
			CHECK(!ibv_post_send(c->id->qp, &wr, &bad));
			c->unfinished++;
		}
	while (ibv_poll_cq(c->id->send_cq, 1, &wc) > 0)
		c->unfinished--;
}

#define MOST 64

static void *serve_cm(void *unused)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener, *ids[MOST];
	struct sockaddr_in at = address(port);
	int count = 0;
	CHECK(channel && !fcntl(channel->fd, F_SETFL, O_NONBLOCK));
	CHECK(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&at) && !rdma_listen(listener, 16));
	for (;;) {
		struct pollfd wait = { .fd = channel->fd, .events = POLLIN };
		poll(&wait, 1, count ? 1 : 100);
		struct rdma_cm_event *event;
		while (!rdma_get_cm_event(channel, &event)) {
			struct rdma_cm_id *id = event->id;
			enum rdma_cm_event_type type = event->event;
			rdma_ack_cm_event(event);
			if (type == RDMA_CM_EVENT_CONNECT_REQUEST && count < MOST) {
				welcome(ids[count++] = id);
			} else if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
				rdma_reject(id, NULL, 0);
				rdma_destroy_id(id);
			} else if (type != RDMA_CM_EVENT_ESTABLISHED && id != listener) {
				int i = 0;
				while (i < count && ids[i] != id)
					i++;
				/* After DISCONNECTED comes TIMEWAIT_EXIT, but not for an id that is gone. */
				if (i < count) {
					ids[i] = ids[--count];
					farewell(id);
				}
			}
		}
		for (int i = 0; i < count; i++)
			echo(ids[i]->context);
	}
	return unused;
}

static void *serve_sockets(void *unused)
{
	static uint8_t bytes[SIZE];
	int listener = rsocket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in at = address(port + 1);
	CHECK(listener >= 0 && !rbind(listener, (struct sockaddr *)&at, sizeof at) && !rlisten(listener, 16));
	for (;;) {
		int socket = raccept(listener, NULL, NULL);
		if (socket < 0)
			continue;
		struct pollfd ready = { .fd = socket, .events = POLLIN };
		ssize_t got;
		while (rpoll(&ready, 1, 5000) > 0 && (got = rrecv(socket, bytes, sizeof bytes, 0)) > 0)
			for (ssize_t sent = 0, now; sent < got; sent += now)
				if ((now = rsend(socket, bytes + sent, (size_t)(got - sent), 0)) <= 0)
					break;
		rclose(socket);
	}
	return unused;
}

/* ---- the worker */

static void converse_by_cm(unsigned round)
{
	struct rdma_cm_id *id;
	struct sockaddr_in to = address(port);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .sq_sig_all = 1,
					 .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1,
						  .max_recv_sge = 1 } };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7,
					 .rnr_retry_count = 7 };
	uint8_t sent[256], got[256];
	CHECK(!rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) && !rdma_resolve_route(id, 2000));
	CHECK(!rdma_create_qp(id, NULL, &init) && !rdma_connect(id, &param));
	struct ibv_mr *from = ibv_reg_mr(id->pd, sent, sizeof sent, 0);
	struct ibv_mr *into = ibv_reg_mr(id->pd, got, sizeof got, IBV_ACCESS_LOCAL_WRITE);
	CHECK(from && into);
	for (unsigned i = 0; i < 8; i++) {
		memset(sent, (int)(round + i), sizeof sent);
		struct ibv_sge sge = { (uintptr_t)got, sizeof got, into->lkey };
		struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
		CHECK(!ibv_post_recv(id->qp, &recv, &bad_recv));
		sge = (struct ibv_sge){ (uintptr_t)sent, sizeof sent, from->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
		CHECK(!ibv_post_send(id->qp, &wr, &bad));
		struct ibv_wc wc;
		double begin = seconds();
		while (ibv_poll_cq(id->recv_cq, 1, &wc) == 0)
			CHECK(seconds() - begin < 30);
		CHECK(wc.status == IBV_WC_SUCCESS && !memcmp(sent, got, sizeof got));
		while (ibv_poll_cq(id->send_cq, 1, &wc) == 0)
			CHECK(seconds() - begin < 30);
	}
	CHECK(!rdma_disconnect(id));
	rdma_destroy_qp(id);
	CHECK(!ibv_dereg_mr(from) && !ibv_dereg_mr(into) && !rdma_destroy_id(id));
}

static void converse_by_socket(unsigned round)
{
	static uint8_t sent[SIZE], got[SIZE];
	struct sockaddr_in to = address(port + 1);
	int socket = rsocket(AF_INET, SOCK_STREAM, 0);
	CHECK(socket >= 0 && !rconnect(socket, (struct sockaddr *)&to, sizeof to));
	memset(sent, (int)round, sizeof sent);
	for (size_t at = 0; at < SIZE;) {
		ssize_t now = rsend(socket, sent + at, SIZE - at > 8192 ? 8192 : SIZE - at, 0);
		CHECK(now > 0);
		for (size_t end = at + (size_t)now; at < end;) {
			ssize_t back = rrecv(socket, got + at, end - at, 0);
			CHECK(back > 0);
			at += (size_t)back;
		}
	}
	CHECK(!memcmp(sent, got, SIZE) && !rclose(socket));
}

static struct ibv_context *context;
static struct ibv_pd *pd;
static union ibv_gid gid;
static uint8_t arena[SIZE * 2];

static void bring_up(struct ibv_qp *qp, uint32_t peer)
{
	int is_ud = qp->qp_type == IBV_QPT_UD, is_rc = qp->qp_type == IBV_QPT_RC;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7, .path_mtu = IBV_MTU_1024,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
				    .dest_qp_num = peer, .max_dest_rd_atomic = 2, .min_rnr_timer = 5, .timeout = 16,
				    .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 2,
				    .ah_attr = { .is_global = 1, .port_num = 1,
						 .grh = { .dgid = gid, .hop_limit = 64 } } };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
						(is_ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
	attr.qp_state = IBV_QPS_RTR;
	int mask = is_ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask |
						(is_rc ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN |
						(is_rc ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
							       IBV_QP_MAX_QP_RD_ATOMIC
						       : 0)));
}

static void send_one(struct ibv_qp *qp, enum ibv_wr_opcode opcode, struct ibv_mr *mr, uint32_t length, struct ibv_ah *ah,
		     uint32_t peer)
{
	struct ibv_sge sge = { (uintptr_t)arena, length, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	if (ah) {
		wr.wr.ud.ah = ah, wr.wr.ud.remote_qpn = peer, wr.wr.ud.remote_qkey = 7;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)arena + SIZE, wr.wr.rdma.rkey = mr->rkey;
	}
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static void await(struct ibv_cq *cq, struct ibv_comp_channel *channel, int count)
{
	double begin = seconds();
	while (count) {
		struct ibv_wc wc;
		int got = ibv_poll_cq(cq, 1, &wc);
		CHECK(got >= 0 && (!got || wc.status == IBV_WC_SUCCESS));
		count -= got;
		if (got || !channel)
			continue;
		/* By an event; one that came between the poll and this is found by the next round. */
		CHECK(!ibv_req_notify_cq(cq, 0));
		struct pollfd wait = { .fd = channel->fd, .events = POLLIN };
		if (poll(&wait, 1, 20) > 0) {
			void *cookie;
			struct ibv_cq *which;
			CHECK(!ibv_get_cq_event(channel, &which, &cookie) && which == cq);
			ibv_ack_cq_events(cq, 1);
		}
		CHECK(seconds() - begin < 30);
	}
}

/* Queue pairs of all types within the process, made, used by polls or events, and destroyed. */
static void converse_alone(unsigned round)
{
	enum ibv_qp_type type = (enum ibv_qp_type[]){ IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD }[round % 3];
	struct ibv_comp_channel *channel = round & 4 ? ibv_create_comp_channel(context) : NULL;
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, channel, 0);
	struct ibv_mr *mr = ibv_reg_mr(pd, arena, sizeof arena, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
								       IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	CHECK(cq && mr && mw);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = type,
					 .cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1,
						  .max_recv_sge = 1 } };
	struct ibv_qp *a = ibv_create_qp(pd, &init), *b = ibv_create_qp(pd, &init);
	CHECK(a && b);
	bring_up(a, b->qp_num);
	bring_up(b, a->qp_num);
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = gid, .hop_limit = 64 } };
	struct ibv_ah *ah = type == IBV_QPT_UD ? ibv_create_ah(pd, &to) : NULL;
	for (unsigned i = 0; i < 4; i++) {
		struct ibv_sge sge = { (uintptr_t)arena + SIZE, SIZE, mr->lkey };
		struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad;
		CHECK(!ibv_post_recv(b, &recv, &bad));
		memset(arena, (int)(round + i), 1024);
		send_one(a, IBV_WR_SEND, mr, 1024, ah, b->qp_num);
		await(cq, channel, 2);
		CHECK(!memcmp(arena, arena + SIZE + (ah ? 40 : 0), 1024));
		if (ah)
			continue;
		memset(arena, (int)(round ^ i), SIZE);
		send_one(a, IBV_WR_RDMA_WRITE, mr, SIZE, NULL, 0);
		await(cq, channel, 1);
		if (type == IBV_QPT_RC)
			send_one(a, IBV_WR_RDMA_READ, mr, SIZE, NULL, 0), await(cq, channel, 1);
	}
	CHECK(!ah || !ibv_destroy_ah(ah));
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_dealloc_mw(mw) && !ibv_dereg_mr(mr));
	CHECK(!ibv_destroy_cq(cq) && (!channel || !ibv_destroy_comp_channel(channel)));
}

/* Keys are given out in turn, and what is kept for one stays until it is used again: memory grows until all were used. */
static void use_every_key(void)
{
	struct ibv_device_attr attr;
	CHECK(!ibv_query_device(context, &attr));
	for (int i = 0; i < attr.max_mr; i++) {
		struct ibv_mr *mr = ibv_reg_mr(pd, arena, 1, 0);
		CHECK(mr && !ibv_dereg_mr(mr));
	}
}

int main(int argc, char **argv)
{
	CHECK(argc > 2);
	port = atoi(argv[2]);
	setvbuf(stdout, NULL, _IOLBF, 0);
	struct ibv_device **list = ibv_get_device_list(NULL);
	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context && !ibv_query_gid(context, 1, 0, &gid));
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	if (!strcmp(argv[1], "serve")) {
		pthread_t threads[2];
		use_every_key();
		CHECK(!pthread_create(&threads[0], NULL, serve_cm, NULL));
		CHECK(!pthread_create(&threads[1], NULL, serve_sockets, NULL));
		while (!input_ended())
			usleep(100000);
		_exit(0);
	}
	double begin = seconds(), limit = argc > 3 ? atof(argv[3]) : 0;
	if (limit == 0)
		use_every_key();
	for (unsigned round = 0; limit > 0 ? seconds() - begin < limit : !input_ended(); round++) {
		converse_alone(round);
		converse_by_cm(round);
		if (round % 4 == 0)
			converse_by_socket(round);
		if (round % 1000 == 999)
			printf("%u rounds\n", round + 1);
	}
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}
