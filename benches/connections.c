/* Many connections of one process to itself, by librdmacm: how fast they come up together, and the memory of one side of one.
 * Usage: connections ADDRESS PORT COUNT. Prints lines "name value": connections, per_second, side_bytes. */
#include "setup.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TIMEOUT_MS = 10000 };

static struct rdma_event_channel *channel;
static struct ibv_context *device;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint64_t *received; /* One a connection; the server's. */
static long count;

/* What all connections share. */
static void share(struct ibv_context *context)
{
	if (device)
		return;
	device = context;
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 4 * count + 16, NULL, NULL, 0);
	received = malloc(count * sizeof(*received));
	if (!pd || !cq || !received)
		fail("PD, CQ or memory");
	memset(received, 0xff, count * sizeof(*received));
	mr = ibv_reg_mr(pd, received, count * sizeof(*received), IBV_ACCESS_LOCAL_WRITE);
	if (!mr)
		fail("ibv_reg_mr");
}

static void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 8},
	};

	share(id->verbs);
	init.send_cq = init.recv_cq = cq;
	if (rdma_create_qp(id, pd, &init))
		fail("rdma_create_qp");
}

static void connect_id(struct rdma_cm_id *id)
{
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};

	create_qp(id);
	if (rdma_connect(id, &param))
		fail("rdma_connect");
}

static void accept_id(struct rdma_cm_id *id, long n)
{
	struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1, .rnr_retry_count = 7};
	struct ibv_sge sge = {.length = sizeof(*received)};
	struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;

	create_qp(id);
	sge.addr = (uintptr_t)&received[n];
	sge.lkey = mr->lkey;
	if (ibv_post_recv(id->qp, &wr, &bad))
		fail("ibv_post_recv");
	if (rdma_accept(id, &param))
		fail("rdma_accept");
}

static void send_number(struct rdma_cm_id *id, uint64_t number)
{
	struct ibv_sge sge = {.addr = (uintptr_t)&number, .length = sizeof(number)};
	struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED, .sg_list = &sge, .num_sge = 1}, *bad;

	if (ibv_post_send(id->qp, &wr, &bad))
		fail("ibv_post_send");
}

int main(int argc, char **argv)
{
	struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM}, *address;
	struct rdma_cm_id *listener, **clients, **servers;
	struct rdma_cm_event *event;
	long accepted = 0, up = 0, before;
	uint64_t sum = 0;
	double start;

	if (argc != 4 || (count = atol(argv[3])) < 1 || getaddrinfo(argv[1], argv[2], &hints, &address)) {
		fprintf(stderr, "usage: %s ADDRESS PORT COUNT\n", argv[0]);
		return 1;
	}
	clients = calloc(count, sizeof(*clients));
	servers = calloc(count, sizeof(*servers));
	channel = rdma_create_event_channel();
	if (!clients || !servers || !channel)
		fail("rdma_create_event_channel");
	if (rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) || rdma_bind_addr(listener, address->ai_addr))
		fail("rdma_bind_addr");
	if (rdma_listen(listener, count))
		fail("rdma_listen");
	/* Before the first look at the memory, if the address has told the device. */
	if (listener->verbs)
		share(listener->verbs);

	before = resident_kib();
	start = now_seconds();
	for (long i = 0; i < count; i++) {
		if (rdma_create_id(channel, &clients[i], NULL, RDMA_PS_TCP))
			fail("rdma_create_id");
		if (rdma_resolve_addr(clients[i], NULL, address->ai_addr, TIMEOUT_MS))
			fail("rdma_resolve_addr");
	}
	while (up < 2 * count) {
		if (rdma_get_cm_event(channel, &event))
			fail("rdma_get_cm_event");
		struct rdma_cm_id *id = event->id;
		int type = event->event, status = event->status;
		rdma_ack_cm_event(event);
		switch (type) {
		case RDMA_CM_EVENT_ADDR_RESOLVED:
			if (rdma_resolve_route(id, TIMEOUT_MS))
				fail("rdma_resolve_route");
			break;
		case RDMA_CM_EVENT_ROUTE_RESOLVED:
			connect_id(id);
			break;
		case RDMA_CM_EVENT_CONNECT_REQUEST:
			if (accepted == count) {
				fprintf(stderr, "more requests than connections\n");
				return 1;
			}
			servers[accepted] = id;
			accept_id(id, accepted++);
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
			up++;
			break;
		default:
			fprintf(stderr, "%s (%d) after %ld of %ld\n", rdma_event_str(type), status, up, 2 * count);
			return 1;
		}
	}
	printf("connections %ld\n", count);
	printf("per_second %.0f\n", count / (now_seconds() - start));
	printf("side_bytes %ld\n", (resident_kib() - before) * 1024 / (2 * count));

	/* Each leads somewhere: every number arrives once. */
	for (long i = 0; i < count; i++)
		send_number(clients[i], i);
	complete(cq, 2 * count);
	for (long i = 0; i < count; i++)
		sum += received[i];
	if (sum != (uint64_t)count * (count - 1) / 2) {
		fprintf(stderr, "not every number arrived\n");
		return 1;
	}

	for (long i = 0; i < count; i++)
		rdma_disconnect(clients[i]);
	for (long i = 0; i < count; i++) {
		rdma_destroy_qp(clients[i]);
		rdma_destroy_id(clients[i]);
		rdma_destroy_qp(servers[i]);
		rdma_destroy_id(servers[i]);
	}
	rdma_destroy_id(listener);
	rdma_destroy_event_channel(channel);
	return 0;
}
