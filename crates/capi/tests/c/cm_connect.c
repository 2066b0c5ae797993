/* Connections of ids on event channels: the events, what they carry, and the ids' public fields at every step. */
#include "cm.h"
#include <pthread.h>

static struct ibv_device *device_of_the_list(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL), *first;
	TRUE(list && list[0]);
	first = list[0];
	ibv_free_device_list(list);
	return first;
}

static union ibv_gid gid_of(const char *ip)
{
	struct sockaddr_storage s = address(ip, 0);
	union ibv_gid gid = { 0 };
	if (s.ss_family == AF_INET) {
		gid.raw[10] = gid.raw[11] = 0xff;
		memcpy(gid.raw + 12, &((struct sockaddr_in *)&s)->sin_addr, 4);
	} else {
		memcpy(gid.raw, &((struct sockaddr_in6 *)&s)->sin6_addr, 16);
	}
	return gid;
}

static int same_gid(const union ibv_gid *a, const union ibv_gid *b)
{
	return memcmp(a, b, sizeof *a) == 0;
}

static void fields(const char *ip)
{
	int family = strchr(ip, ':') ? AF_INET6 : AF_INET, context;
	union ibv_gid gid = gid_of(ip);
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *server = listener(c, ip, RDMA_PS_TCP, &context);
	/* A specific address is one of a device. */
	TRUE(server->verbs && server->verbs->device == device_of_the_list() && server->pd && server->port_num == 1);
	EQ(rdma_get_local_addr(server)->sa_family, family);
	EQ(rdma_get_dst_port(server), 0);
	TRUE(same_gid(&server->route.addr.addr.ibaddr.sgid, &gid));

	struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_TCP);
	struct sockaddr_storage to = address(ip, port_of(server));
	OK(rdma_resolve_addr(id, NULL, sa(&to), 2000));
	EQ(memcmp(rdma_get_peer_addr(id), &to, family == AF_INET ? 8 : 24), 0);
	expect_ok(c, id, RDMA_CM_EVENT_ADDR_RESOLVED);
	/* One open device, one protection domain for all ids. */
	TRUE(id->verbs == server->verbs && id->pd == server->pd && id->port_num == 1);
	EQ(rdma_get_local_addr(id)->sa_family, family);
	TRUE(rdma_get_src_port(id) != 0);
	EQ(rdma_get_dst_port(id), rdma_get_src_port(server));
	struct rdma_ib_addr *ib = &id->route.addr.addr.ibaddr;
	TRUE(same_gid(&ib->sgid, &gid) && same_gid(&ib->dgid, &gid));
	EQ(ib->pkey, 0xffff);
	TRUE(!id->route.path_rec && !id->route.num_paths);
	OK(rdma_resolve_route(id, 2000));
	expect_ok(c, id, RDMA_CM_EVENT_ROUTE_RESOLVED);
	EQ(id->route.num_paths, 1);
	struct ibv_sa_path_rec *path = id->route.path_rec;
	TRUE(path && same_gid(&path->sgid, &gid) && same_gid(&path->dgid, &gid));
	EQ(path->pkey, 0xffff);
	TRUE(path->mtu >= IBV_MTU_256 && path->mtu <= IBV_MTU_4096);

	create_qp(id, IBV_QPT_RC);
	char data[56];
	memset(data, 7, sizeof data);
	struct rdma_conn_param p = { .private_data = data, .private_data_len = sizeof data, .responder_resources = 3,
		.initiator_depth = 2, .flow_control = 1, .retry_count = 5, .rnr_retry_count = 6 };
	OK(rdma_connect(id, &p));

	struct rdma_cm_event *e = expect(c, NULL, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *other = e->id;
	EQ(e->status, 0);
	TRUE(e->listen_id == server && other != server && other != id);
	TRUE(other->channel == c && other->context == &context && other->ps == RDMA_PS_TCP && other->qp_type == IBV_QPT_RC);
	TRUE(other->verbs == id->verbs && other->pd == id->pd && other->port_num == 1 && !other->qp && !other->event);
	EQ(rdma_get_src_port(other), rdma_get_src_port(server));
	EQ(rdma_get_dst_port(other), rdma_get_src_port(id));
	TRUE(same_gid(&other->route.addr.addr.ibaddr.dgid, &gid));
	EQ(other->route.num_paths, 1);
	struct rdma_conn_param *conn = &e->param.conn;
	EQ(conn->private_data_len, 56);
	EQ(memcmp(conn->private_data, data, 56), 0);
	/* Seen from the other side. */
	EQ(conn->responder_resources, 2);
	EQ(conn->initiator_depth, 3);
	EQ(conn->flow_control, 1);
	EQ(conn->retry_count, 5);
	EQ(conn->rnr_retry_count, 6);
	EQ(conn->srq, 0);
	EQ(conn->qp_num, id->qp->qp_num);
	OK(rdma_ack_cm_event(e));

	create_qp(other, IBV_QPT_RC);
	memset(&p, 0, sizeof p);
	p.private_data = "hi";
	p.private_data_len = 2;
	p.responder_resources = 2;
	p.initiator_depth = 1;
	p.rnr_retry_count = 4;
	OK(rdma_accept(other, &p));
	EQ(other->qp->state, IBV_QPS_RTS);
	e = expect(c, id, RDMA_CM_EVENT_ESTABLISHED);
	TRUE(e->listen_id == NULL);
	conn = &e->param.conn;
	/* The REP's whole private data: what the peer gave is padded with zeros. */
	EQ(conn->private_data_len, 196);
	EQ(memcmp(conn->private_data, "hi\0\0", 4), 0);
	EQ(conn->responder_resources, 1);
	EQ(conn->initiator_depth, 2);
	EQ(conn->rnr_retry_count, 4);
	EQ(conn->qp_num, other->qp->qp_num);
	OK(rdma_ack_cm_event(e));
	EQ(id->qp->state, IBV_QPS_RTS);
	e = expect(c, other, RDMA_CM_EVENT_ESTABLISHED);
	TRUE(e->listen_id == NULL);
	EQ(e->param.conn.private_data_len, 0);
	TRUE(e->param.conn.private_data == NULL);
	OK(rdma_ack_cm_event(e));

	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	OK(ibv_query_qp(id->qp, &a, 0, &i));
	EQ(a.dest_qp_num, other->qp->qp_num);
	EQ(a.max_dest_rd_atomic, 1);
	EQ(a.max_rd_atomic, 2);
	EQ(a.retry_cnt, 5);
	EQ(a.rnr_retry, 4);
	OK(ibv_query_qp(other->qp, &a, 0, &i));
	EQ(a.max_dest_rd_atomic, 2);
	EQ(a.max_rd_atomic, 1);
	EQ(a.rnr_retry, 6);
	talk(id, other);

	OK(rdma_disconnect(id));
	EQ(id->qp->state, IBV_QPS_ERR);
	e = expect(c, other, RDMA_CM_EVENT_DISCONNECTED);
	EQ(e->status, 0);
	OK(rdma_ack_cm_event(e));
	OK(rdma_disconnect(other));
	expect_ok(c, id, RDMA_CM_EVENT_DISCONNECTED);
	EQ(state_of(other->qp), IBV_QPS_ERR);
	destroy_end(id);
	destroy_end(other);
	OK(rdma_destroy_id(server));
	rdma_destroy_event_channel(c);
}

static void rejected(void)
{
	struct connection c = begin_connection("127.0.0.1");
	create_qp(c.active, IBV_QPT_RC);
	OK(rdma_connect(c.active, NULL));
	take_request(&c);
	OK(rdma_reject(c.passive, "no", 2));
	struct rdma_cm_event *e = expect(c.active_channel, c.active, RDMA_CM_EVENT_REJECTED);
	EQ(e->status, 28);
	EQ(e->param.conn.private_data_len, 148);
	EQ(memcmp(e->param.conn.private_data, "no\0", 3), 0);
	OK(rdma_ack_cm_event(e));
	EQ(c.active->qp->state, IBV_QPS_ERR);
	/* It was answered. */
	MINUS_ONE(rdma_accept(c.passive, NULL), EINVAL);
	end_connection(&c);

	/* Nobody listens. */
	c = begin_connection("127.0.0.1");
	OK(rdma_destroy_id(c.listener));
	OK(rdma_connect(c.active, &(struct rdma_conn_param){ .qp_num = 0x123456 }));
	e = expect(c.active_channel, c.active, RDMA_CM_EVENT_REJECTED);
	EQ(e->status, 8);
	OK(rdma_ack_cm_event(e));
	c.listener = new_id(c.passive_channel, NULL, RDMA_PS_TCP);
	end_connection(&c);
}

/* S3: without a queue pair on the id the program moves its own. */
static void own_queue_pairs(void)
{
	struct connection c = begin_connection("127.0.0.1");
	struct rdma_cm_id *id = c.active;
	struct end a = make_end(id->pd, IBV_QPT_RC), b = make_end(id->pd, IBV_QPT_RC);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	int mask = 0;
	OK(rdma_init_qp_attr(id, &attr, &mask));
	TRUE(attr.qp_state == IBV_QPS_INIT && attr.port_num == 1 && (mask & IBV_QP_STATE));
	OK(ibv_modify_qp(a.qp, &attr, mask));
	attr.qp_state = IBV_QPS_RTR;
	MINUS_ONE(rdma_init_qp_attr(id, &attr, &mask), EINVAL);
	MINUS_ONE(rdma_establish(id), EINVAL);

	MINUS_ONE(rdma_connect(id, NULL), EINVAL);
	struct rdma_conn_param p = { .responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7,
		.qp_num = a.qp->qp_num, .srq = 1 };
	OK(rdma_connect(id, &p));
	struct rdma_cm_event *e = expect(c.passive_channel, NULL, RDMA_CM_EVENT_CONNECT_REQUEST);
	c.passive = e->id;
	EQ(e->param.conn.qp_num, a.qp->qp_num);
	EQ(e->param.conn.srq, 1);
	/* The event's own parameters may be given. */
	struct rdma_conn_param answer = e->param.conn;
	answer.qp_num = b.qp->qp_num;
	for (int state = IBV_QPS_INIT; state <= IBV_QPS_RTS; state++) {
		attr.qp_state = state;
		OK(rdma_init_qp_attr(c.passive, &attr, &mask));
		OK(ibv_modify_qp(b.qp, &attr, mask));
	}
	MINUS_ONE(rdma_accept(c.passive, NULL), EINVAL);
	OK(rdma_accept(c.passive, &answer));
	OK(rdma_ack_cm_event(e));
	e = expect(c.active_channel, id, RDMA_CM_EVENT_CONNECT_RESPONSE);
	EQ(e->param.conn.qp_num, b.qp->qp_num);
	OK(rdma_ack_cm_event(e));
	for (int state = IBV_QPS_RTR; state <= IBV_QPS_RTS; state++) {
		attr.qp_state = state;
		OK(rdma_init_qp_attr(id, &attr, &mask));
		OK(ibv_modify_qp(a.qp, &attr, mask));
	}
	OK(rdma_establish(id));
	expect_ok(c.passive_channel, c.passive, RDMA_CM_EVENT_ESTABLISHED);
	OK(post_recv(&b, 1, 8));
	OK(post_send(&a, 2, 8, IBV_SEND_SIGNALED));
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	EQ(poll_one(b.cq).status, IBV_WC_SUCCESS);
	OK(rdma_disconnect(id));
	expect_ok(c.passive_channel, c.passive, RDMA_CM_EVENT_DISCONNECTED);
	free_end(&a);
	free_end(&b);
	end_connection(&c);
}

/* A queue pair of the program's that it shows as id->qp is the id's. */
static void shown_queue_pair(void)
{
	struct connection c = begin_connection("127.0.0.1");
	struct end a = make_end(c.active->pd, IBV_QPT_RC);
	c.active->qp = a.qp;
	OK(rdma_connect(c.active, NULL));
	take_request(&c);
	create_qp(c.passive, IBV_QPT_RC);
	OK(rdma_accept(c.passive, NULL));
	expect_ok(c.active_channel, c.active, RDMA_CM_EVENT_ESTABLISHED);
	EQ(a.qp->state, IBV_QPS_RTS);
	expect_ok(c.passive_channel, c.passive, RDMA_CM_EVENT_ESTABLISHED);
	/* Taken back: destroying the id leaves it alone. */
	c.active->qp = NULL;
	OK(rdma_destroy_id(c.active));
	EQ(state_of(a.qp), IBV_QPS_RTS);
	free_end(&a);
	c.active = new_id(c.active_channel, NULL, RDMA_PS_TCP);
	end_connection(&c);
}

/* Programs destroy id->qp themselves, and the id with its queue pair. */
static void queue_pair_and_id_apart(void)
{
	struct connection c = make_connection("127.0.0.1");
	struct ibv_cq *cqs[] = { c.active->send_cq, c.active->recv_cq };
	OK(ibv_destroy_qp(c.active->qp));
	OK(rdma_disconnect(c.active));
	OK(rdma_destroy_id(c.active));
	OK(ibv_destroy_cq(cqs[0]));
	OK(ibv_destroy_cq(cqs[1]));
	expect_ok(c.passive_channel, c.passive, RDMA_CM_EVENT_DISCONNECTED);
	struct ibv_qp *qp = c.passive->qp;
	OK(rdma_destroy_id(c.passive));
	OK(ibv_destroy_qp(qp));
	c.active = new_id(c.active_channel, NULL, RDMA_PS_TCP);
	c.passive = NULL;
	end_connection(&c);
}

static void a_vanished_peer(void)
{
	struct connection c = make_connection("127.0.0.1");
	destroy_end(c.passive);
	expect_ok(c.active_channel, c.active, RDMA_CM_EVENT_DISCONNECTED);
	c.passive = NULL;
	end_connection(&c);
}

static void migrated(void)
{
	struct connection c = begin_connection("127.0.0.1");
	create_qp(c.active, IBV_QPT_RC);
	OK(rdma_connect(c.active, NULL));
	take_request(&c);
	create_qp(c.passive, IBV_QPT_RC);
	OK(rdma_accept(c.passive, NULL));
	/* Waiting events come along. */
	EQ(readable(c.active_channel, 10000), 1);
	struct rdma_event_channel *to = channel();
	OK(rdma_migrate_id(c.active, to));
	TRUE(c.active->channel == to);
	EQ(readable(c.active_channel, 0), 0);
	expect_ok(to, c.active, RDMA_CM_EVENT_ESTABLISHED);
	expect_ok(c.passive_channel, c.passive, RDMA_CM_EVENT_ESTABLISHED);
	/* To synchronous mode, in which calls wait for their event. */
	OK(rdma_migrate_id(c.active, NULL));
	TRUE(c.active->channel != to);
	MINUS_ONE(rdma_migrate_id(c.active, NULL), EINVAL);
	OK(rdma_disconnect(c.passive));
	OK(rdma_disconnect(c.active));
	TRUE(c.active->event != NULL);
	EQ(c.active->event->event, RDMA_CM_EVENT_DISCONNECTED);
	OK(rdma_migrate_id(c.active, to));
	TRUE(c.active->event == NULL);
	end_connection(&c);
	rdma_destroy_event_channel(to);
}

struct move {
	struct rdma_cm_id *id;
	struct rdma_event_channel *to;
};

static void *migrate(void *move)
{
	struct move *m = move;
	OK(rdma_migrate_id(m->id, m->to));
	return NULL;
}

static struct rdma_cm_id *begin_connecting(struct rdma_event_channel *c, struct rdma_cm_id *server)
{
	struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_TCP);
	resolve(id, "127.0.0.1", port_of(server));
	create_qp(id, IBV_QPT_RC);
	OK(rdma_connect(id, NULL));
	return id;
}

/* A listener moves, and waits for an event that another thread has read: requests are read on its new channel already. */
static void migrating_listener(void)
{
	struct rdma_event_channel *active = channel(), *from = channel(), *to = channel();
	struct rdma_cm_id *server = listener(from, "127.0.0.1", RDMA_PS_TCP, NULL);
	struct rdma_cm_id *first = begin_connecting(active, server);
	struct rdma_cm_event *old = expect(from, NULL, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct move move = { server, to };
	pthread_t thread;
	OK(pthread_create(&thread, NULL, migrate, &move));
	while (*(struct rdma_event_channel *volatile *)&server->channel != to)
		usleep(1000);
	struct rdma_cm_id *second = begin_connecting(active, server);
	struct rdma_cm_event *new = expect(to, NULL, RDMA_CM_EVENT_CONNECT_REQUEST);
	TRUE(new->listen_id == server && new->id->channel == to && old->id->channel == from);
	struct rdma_cm_id *ends[] = { first, second, old->id, new->id };
	/* The move does not wait for this one. */
	OK(rdma_ack_cm_event(old));
	OK(pthread_join(thread, NULL));
	OK(rdma_ack_cm_event(new));
	for (int i = 0; i < 4; i++)
		destroy_end(ends[i]);
	OK(rdma_destroy_id(server));
	rdma_destroy_event_channel(active), rdma_destroy_event_channel(from), rdma_destroy_event_channel(to);
}

static void options_of_vendors(void)
{
	struct connection c = begin_connection("127.0.0.1");
	struct ibv_ece ece = { .vendor_id = 0x123456, .options = 0xabcdef01 }, got;
	OK(rdma_set_local_ece(c.active, &ece));
	OK(rdma_connect(c.active, &(struct rdma_conn_param){ .qp_num = 0x123456 }));
	take_request(&c);
	OK(rdma_get_remote_ece(c.passive, &got));
	EQ(got.vendor_id, 0x123456);
	EQ(got.options, 0xabcdef01);
	OK(rdma_reject_ece(c.passive, NULL, 0));
	struct rdma_cm_event *e = expect(c.active_channel, c.active, RDMA_CM_EVENT_REJECTED);
	EQ(e->status, 35);
	OK(rdma_ack_cm_event(e));
	end_connection(&c);
}

int main(void)
{
	fields("127.0.0.1");
	fields("::1");
	rejected();
	own_queue_pairs();
	shown_queue_pair();
	queue_pair_and_id_apart();
	a_vanished_peer();
	migrated();
	migrating_listener();
	options_of_vendors();
	return 0;
}
