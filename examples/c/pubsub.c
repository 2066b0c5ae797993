/* Publish and subscribe: datagrams to a multicast group reach every subscriber.
 *
 *   cc -o pubsub pubsub.c -libverbs -lrdmacm
 *   pubsub sub GROUP COUNT       prints so many messages
 *   pubsub pub GROUP TEXT ...    sends one message for each text
 *
 * GROUP is an address such as 239.7.4.1. Datagrams are not acknowledged: a subscriber that is slow or late misses some.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

enum { SIZE = 256, GRH = 40, DEPTH = 16 };

static void check(int failed, const char *what)
{
	if (failed) {
		perror(what);
		exit(1);
	}
}

static void succeeded(const struct ibv_wc *wc)
{
	if (wc->status != IBV_WC_SUCCESS) {
		fprintf(stderr, "completion: %s\n", ibv_wc_status_str(wc->status));
		exit(1);
	}
}

/* The next event of the connection manager, which must be this one. */
static struct rdma_cm_event *expect(struct rdma_event_channel *channel, enum rdma_cm_event_type wanted)
{
	struct rdma_cm_event *event;
	check(rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
	if (event->event != wanted) {
		fprintf(stderr, "%s, status %d\n", rdma_event_str(event->event), event->status);
		exit(1);
	}
	return event;
}

int main(int argc, char **argv)
{
	int publishes = argc > 3 && !strcmp(argv[1], "pub"), count = 0; char rest;
	int subscribes = argc == 4 && !strcmp(argv[1], "sub") && sscanf(argv[3], "%9d%c", &count, &rest) == 1 && count > 0;
	if (!publishes && !subscribes)
		return fprintf(stderr, "usage: pubsub sub GROUP COUNT | pubsub pub GROUP TEXT...\n"), 2;

	struct rdma_event_channel *channel = rdma_create_event_channel();
	check(!channel, "rdma_create_event_channel");
	struct rdma_cm_id *id;
	check(rdma_create_id(channel, &id, NULL, RDMA_PS_UDP), "rdma_create_id");

	/* The route to the group decides the interface. */
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_UDP }, *info;
	check(rdma_getaddrinfo(argv[2], "0", &hints, &info), "rdma_getaddrinfo");
	check(rdma_resolve_addr(id, NULL, info->ai_dst_addr, 2000), "rdma_resolve_addr");
	rdma_ack_cm_event(expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED));

	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_UD,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.sq_sig_all = 1,
	};
	check(rdma_create_qp(id, NULL, &attr), "rdma_create_qp");

	/* Each message has a place of its own. A datagram arrives with room for its headers before it. */
	static char memory[DEPTH][GRH + SIZE];
	struct ibv_mr *mr = rdma_reg_msgs(id, memory, sizeof memory);
	check(!mr, "rdma_reg_msgs");
	for (int i = 0; i < DEPTH && !publishes; i++)
		check(rdma_post_recv(id, memory[i], memory[i], sizeof memory[i], mr), "rdma_post_recv");

	check(rdma_join_multicast(id, info->ai_dst_addr, NULL), "rdma_join_multicast");
	struct rdma_cm_event *joined = expect(channel, RDMA_CM_EVENT_MULTICAST_JOIN);
	struct rdma_ud_param group = joined->param.ud;
	struct ibv_ah *ah = ibv_create_ah(id->pd, &group.ah_attr);
	check(!ah, "ibv_create_ah");
	rdma_ack_cm_event(joined);

	struct ibv_wc wc;
	if (publishes) {
		for (char **text = argv + 3; *text; text++) {
			int length = snprintf(memory[0], SIZE, "%s", *text);
			check(rdma_post_ud_send(id, NULL, memory[0], length < SIZE ? length : SIZE - 1, mr, 0, ah,
						group.qp_num), "rdma_post_ud_send");
			check(rdma_get_send_comp(id, &wc) < 0, "rdma_get_send_comp");
			succeeded(&wc);
		}
	} else {
		printf("subscribed to %s\n", argv[2]);
		fflush(stdout);
		for (; count > 0; count--) {
			check(rdma_get_recv_comp(id, &wc) < 0, "rdma_get_recv_comp");
			succeeded(&wc);
			char *datagram = (char *)(uintptr_t)wc.wr_id;
			printf("%.*s\n", (int)wc.byte_len - GRH, datagram + GRH);
			fflush(stdout);
			check(rdma_post_recv(id, datagram, datagram, GRH + SIZE, mr), "rdma_post_recv");
		}
	}

	ibv_destroy_ah(ah);
	rdma_leave_multicast(id, info->ai_dst_addr);
	/* Receives are posted, which use the region. */
	rdma_destroy_qp(id);
	rdma_dereg_mr(mr);
	rdma_destroy_id(id);
	rdma_destroy_event_channel(channel);
	rdma_freeaddrinfo(info);
	return 0;
}
