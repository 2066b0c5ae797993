/* A connection request that the library cannot give to the program, since its own ibv_alloc_pd fails by a script: its sender is told that there
 * are no resources, and not that the program refused it. Run with two devices, and the rule "ibv_alloc_pd 2 fails with EPERM". */
#include "cm.h"

int main(void)
{
	struct rdma_event_channel *there = channel(), *here = channel();
	struct rdma_cm_id *server = new_id(there, NULL, RDMA_PS_TCP), *id = new_id(here, NULL, RDMA_PS_TCP);
	struct sockaddr_storage any = address("0.0.0.0", 0), from = address("127.0.0.1", 0);
	OK(rdma_bind_addr(server, sa(&any)));
	OK(rdma_listen(server, 0));
	OK(fcntl(there->fd, F_SETFL, O_NONBLOCK));

	/* The id is on the first device, which has its protection domain. The request comes to the second one. */
	struct sockaddr_storage to = address("127.0.0.2", ntohs(rdma_get_src_port(server)));
	OK(rdma_resolve_addr(id, sa(&from), sa(&to), 2000));
	expect_ok(here, id, RDMA_CM_EVENT_ADDR_RESOLVED);
	OK(rdma_resolve_route(id, 2000));
	expect_ok(here, id, RDMA_CM_EVENT_ROUTE_RESOLVED);
	create_qp(id, IBV_QPT_RC);
	struct rdma_conn_param param = { .retry_count = 7 };
	OK(rdma_connect(id, &param));
	struct rdma_cm_event *e = NULL;
	EQ(readable(there, 10000), 1);
	EQ(rdma_get_cm_event(there, &e), -1);
	EQ(errno, EAGAIN);
	e = expect(here, id, RDMA_CM_EVENT_REJECTED);
	EQ(e->status, 3);
	OK(rdma_ack_cm_event(e));

	/* The next one comes. */
	struct rdma_cm_id *again = new_id(here, NULL, RDMA_PS_TCP);
	OK(rdma_resolve_addr(again, sa(&from), sa(&to), 2000));
	expect_ok(here, again, RDMA_CM_EVENT_ADDR_RESOLVED);
	OK(rdma_resolve_route(again, 2000));
	expect_ok(here, again, RDMA_CM_EVENT_ROUTE_RESOLVED);
	create_qp(again, IBV_QPT_RC);
	OK(rdma_connect(again, &param));
	e = expect(there, NULL, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *request = e->id;
	OK(rdma_ack_cm_event(e));
	OK(rdma_reject(request, NULL, 0));
	e = expect(here, again, RDMA_CM_EVENT_REJECTED);
	EQ(e->status, 28);
	OK(rdma_ack_cm_event(e));
	OK(rdma_destroy_id(request));
	rdma_destroy_qp(id), rdma_destroy_qp(again);
	OK(rdma_destroy_id(id));
	OK(rdma_destroy_id(again));
	OK(rdma_destroy_id(server));
	rdma_destroy_event_channel(there);
	rdma_destroy_event_channel(here);
	return 0;
}
