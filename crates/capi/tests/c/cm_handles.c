/* librdmacm and the mistakes of its callers: NULL, stale and foreign pointers, values out of range, calls at the wrong time. */
#include "cm.h"

#include <dlfcn.h>
#include <time.h>

static int (*write_cm_event)(struct rdma_cm_id *, enum rdma_cm_event_type, int, uint64_t);
static int (*resolve_addrinfo)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *);
static int (*query_addrinfo)(struct rdma_cm_id *, struct rdma_addrinfo **);

/* Every call on an id that there is not. */
static void refuse_id(struct rdma_cm_id *id)
{
	struct sockaddr_storage a = address("127.0.0.1", 1);
	struct rdma_conn_param param = { 0 };
	struct ibv_qp_init_attr qp = small_qp(IBV_QPT_RC);
	struct ibv_qp_init_attr_ex qp_ex = { 0 };
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_srq_init_attr_ex srq_ex = { .comp_mask = IBV_SRQ_INIT_ATTR_TYPE };
	struct rdma_cm_join_mc_attr_ex join = { 0 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	struct ibv_ece ece = { .vendor_id = 1 };
	struct rdma_addrinfo *info;
	struct rdma_cm_id *new;
	int mask, one = 1;

	MINUS_ONE(rdma_bind_addr(id, sa(&a)), EINVAL);
	MINUS_ONE(rdma_resolve_addr(id, NULL, sa(&a), 1), EINVAL);
	MINUS_ONE(rdma_resolve_route(id, 1), EINVAL);
	MINUS_ONE(rdma_listen(id, 1), EINVAL);
	MINUS_ONE(rdma_get_request(id, &new), EINVAL);
	MINUS_ONE(rdma_connect(id, &param), EINVAL);
	MINUS_ONE(rdma_accept(id, &param), EINVAL);
	MINUS_ONE(rdma_reject(id, NULL, 0), EINVAL);
	MINUS_ONE(rdma_reject_ece(id, NULL, 0), EINVAL);
	MINUS_ONE(rdma_establish(id), EINVAL);
	MINUS_ONE(rdma_notify(id, IBV_EVENT_COMM_EST), EINVAL);
	MINUS_ONE(rdma_disconnect(id), EINVAL);
	MINUS_ONE(rdma_migrate_id(id, NULL), EINVAL);
	MINUS_ONE(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof one), EINVAL);
	MINUS_ONE(rdma_create_qp(id, NULL, &qp), EINVAL);
	MINUS_ONE(rdma_create_qp_ex(id, &qp_ex), EINVAL);
	MINUS_ONE(rdma_create_srq(id, NULL, &srq), EINVAL);
	MINUS_ONE(rdma_create_srq_ex(id, &srq_ex), EINVAL);
	MINUS_ONE(rdma_join_multicast(id, sa(&a), NULL), EINVAL);
	MINUS_ONE(rdma_join_multicast_ex(id, &join, NULL), EINVAL);
	MINUS_ONE(rdma_leave_multicast(id, sa(&a)), EINVAL);
	MINUS_ONE(rdma_init_qp_attr(id, &attr, &mask), EINVAL);
	MINUS_ONE(rdma_set_local_ece(id, &ece), EINVAL);
	MINUS_ONE(rdma_get_remote_ece(id, &ece), EINVAL);
	MINUS_ONE(write_cm_event(id, RDMA_CM_EVENT_USER, 0, 0), EINVAL);
	MINUS_ONE(resolve_addrinfo(id, "127.0.0.1", "1", NULL), EINVAL);
	MINUS_ONE(query_addrinfo(id, &info), EINVAL);
	EQ(rdma_get_src_port(id), 0);
	EQ(rdma_get_dst_port(id), 0);
	rdma_destroy_qp(id);
	rdma_destroy_srq(id);
	rdma_destroy_ep(id);
	MINUS_ONE(rdma_destroy_id(id), EINVAL);
}

static void pointers(void)
{
	struct rdma_event_channel *c = channel();
	struct rdma_cm_event *e;
	struct rdma_cm_id *id;

	refuse_id(NULL);
	/* Of another kind, and of nothing. */
	refuse_id((struct rdma_cm_id *)c);
	refuse_id((struct rdma_cm_id *)&e);
	MINUS_ONE(rdma_create_id(c, NULL, NULL, RDMA_PS_TCP), EINVAL);
	MINUS_ONE(rdma_create_id((struct rdma_event_channel *)&e, &id, NULL, RDMA_PS_TCP), EINVAL);
	MINUS_ONE(rdma_create_id(c, &id, NULL, 0x1234), EINVAL);
	MINUS_ONE(rdma_get_cm_event(NULL, &e), EINVAL);
	MINUS_ONE(rdma_get_cm_event(c, NULL), EINVAL);
	MINUS_ONE(rdma_ack_cm_event(NULL), EINVAL);
	MINUS_ONE(rdma_ack_cm_event((struct rdma_cm_event *)c), EINVAL);
	MINUS_ONE(rdma_create_ep(NULL, NULL, NULL, NULL), EINVAL);
	MINUS_ONE(rdma_create_ep(&id, NULL, NULL, NULL), EINVAL);
	rdma_destroy_event_channel(NULL);
	rdma_free_devices(NULL);
	rdma_freeaddrinfo(NULL);

	id = new_id(c, NULL, RDMA_PS_TCP);
	struct rdma_cm_id *stale = id;
	struct sockaddr_storage a = address("127.0.0.1", 1);
	MINUS_ONE(rdma_bind_addr(id, NULL), EINVAL);
	MINUS_ONE(rdma_resolve_addr(id, sa(&a), NULL, 1), EINVAL);
	a.ss_family = AF_UNIX;
	MINUS_ONE(rdma_bind_addr(id, sa(&a)), EINVAL);
	MINUS_ONE(rdma_resolve_addr(id, NULL, sa(&a), 1), EINVAL);
	MINUS_ONE(rdma_leave_multicast(id, sa(&a)), EINVAL);
	MINUS_ONE(rdma_migrate_id(id, (struct rdma_event_channel *)&a), EINVAL);
	MINUS_ONE(rdma_get_request(id, NULL), EINVAL);
	MINUS_ONE(rdma_create_qp(id, NULL, NULL), EINVAL);
	MINUS_ONE(rdma_create_qp_ex(id, NULL), EINVAL);
	MINUS_ONE(rdma_create_srq(id, NULL, NULL), EINVAL);
	MINUS_ONE(rdma_create_srq_ex(id, NULL), EINVAL);
	MINUS_ONE(rdma_join_multicast_ex(id, NULL, NULL), EINVAL);
	MINUS_ONE(rdma_init_qp_attr(id, NULL, NULL), EINVAL);
	MINUS_ONE(rdma_set_local_ece(id, NULL), EINVAL);
	MINUS_ONE(rdma_get_remote_ece(id, NULL), EINVAL);
	MINUS_ONE(query_addrinfo(id, NULL), EINVAL);
	OK(rdma_destroy_id(id));
	refuse_id(stale);
	rdma_destroy_event_channel(c);
	// Not at once: an event thread that comes back while the program ends must not fail before it has.
	struct timespec began, ended;
	clock_gettime(CLOCK_MONOTONIC, &began);
	MINUS_ONE(rdma_get_cm_event(c, &e), EINVAL);
	clock_gettime(CLOCK_MONOTONIC, &ended);
	long ms = (ended.tv_sec - began.tv_sec) * 1000 + (ended.tv_nsec - began.tv_nsec) / 1000000;
	TRUE(ms >= 900);
	rdma_destroy_event_channel(c);
}

/* Calls before their time. */
static void too_early(void)
{
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_TCP);
	struct rdma_conn_param param = { .qp_num = 0x123456 };
	struct ibv_qp_init_attr qp = small_qp(IBV_QPT_RC);
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT };
	struct rdma_addrinfo *info;
	struct rdma_cm_id *other;
	int mask;

	MINUS_ONE(rdma_resolve_route(id, 1), EINVAL);
	MINUS_ONE(rdma_connect(id, &param), EINVAL);
	MINUS_ONE(rdma_accept(id, &param), EINVAL);
	MINUS_ONE(rdma_reject(id, NULL, 0), EINVAL);
	MINUS_ONE(rdma_establish(id), EINVAL);
	MINUS_ONE(rdma_disconnect(id), EINVAL);
	MINUS_ONE(rdma_notify(id, IBV_EVENT_COMM_EST), EINVAL);
	MINUS_ONE(rdma_create_qp(id, NULL, &qp), EINVAL);
	MINUS_ONE(rdma_create_srq(id, NULL, &srq), EINVAL);
	MINUS_ONE(rdma_init_qp_attr(id, &attr, &mask), EINVAL);
	MINUS_ONE(query_addrinfo(id, &info), ENODATA);
	/* On a program's channel. */
	MINUS_ONE(rdma_get_request(id, &other), EINVAL);
	rdma_destroy_qp(id);
	rdma_destroy_srq(id);

	/* Once only. */
	struct sockaddr_storage a = address("127.0.0.1", 0);
	OK(rdma_bind_addr(id, sa(&a)));
	MINUS_ONE(rdma_bind_addr(id, sa(&a)), EINVAL);
	OK(rdma_listen(id, 1));
	MINUS_ONE(rdma_listen(id, 1), EINVAL);
	MINUS_ONE(rdma_resolve_addr(id, NULL, sa(&a), 1), EINVAL);
	OK(rdma_create_qp(id, NULL, &qp));
	MINUS_ONE(rdma_create_qp(id, NULL, &qp), EINVAL);
	rdma_destroy_qp(id);
	rdma_destroy_qp(id);
	OK(rdma_create_srq(id, NULL, &srq));
	TRUE(id->srq != NULL);
	MINUS_ONE(rdma_create_srq(id, NULL, &srq), EINVAL);
	rdma_destroy_srq(id);
	TRUE(id->srq == NULL);
	rdma_destroy_srq(id);
	OK(rdma_destroy_id(id));

	/* No address of this host. */
	id = new_id(c, NULL, RDMA_PS_TCP);
	a = address("192.0.2.1", 0);
	MINUS_ONE(rdma_bind_addr(id, sa(&a)), EADDRNOTAVAIL);
	OK(rdma_destroy_id(id));
	rdma_destroy_event_channel(c);
}

static void values(void)
{
	struct connection c = begin_connection("127.0.0.1");
	struct rdma_cm_id *id = c.active;
	uint8_t byte = 32;
	int one = 1;
	MINUS_ONE(rdma_set_option(id, 7, 0, &one, sizeof one), ENOSYS);
	MINUS_ONE(rdma_set_option(id, RDMA_OPTION_ID, 99, &one, sizeof one), ENOSYS);
	MINUS_ONE(rdma_set_option(id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &one, sizeof one), ENOSYS);
	MINUS_ONE(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &one, sizeof one), EINVAL);
	MINUS_ONE(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, NULL, 1), EINVAL);
	MINUS_ONE(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &byte, 1), EINVAL);
	MINUS_ONE(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, 1), EINVAL);
	byte = 20;
	OK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &byte, 1));
	OK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &byte, 1));
	OK(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof one));
	MINUS_ONE(rdma_notify(id, IBV_EVENT_QP_FATAL), EINVAL);
	MINUS_ONE(rdma_notify(id, 4711), EINVAL);
	struct ibv_qp_attr attr = { .qp_state = 4711 };
	int mask;
	MINUS_ONE(rdma_init_qp_attr(id, &attr, &mask), EINVAL);

	struct ibv_ece ece = { .vendor_id = 0 };
	MINUS_ONE(rdma_set_local_ece(id, &ece), EINVAL);
	ece.vendor_id = 1 << 24;
	MINUS_ONE(rdma_set_local_ece(id, &ece), EINVAL);

	struct rdma_cm_join_mc_attr_ex join = { .comp_mask = 4 };
	MINUS_ONE(rdma_join_multicast_ex(id, &join, NULL), ENOTSUP);
	join.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS;
	MINUS_ONE(rdma_join_multicast_ex(id, &join, NULL), EINVAL);
	join.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	join.join_flags = RDMA_MC_JOIN_FLAG_RESERVED;
	MINUS_ONE(rdma_join_multicast_ex(id, &join, NULL), EINVAL);

	struct ibv_srq_init_attr_ex srq = { .attr = { .max_wr = 1, .max_sge = 1 } };
	MINUS_ONE(rdma_create_srq_ex(id, &srq), EINVAL);

	/* A queue pair that cannot be: what was made for it is gone. */
	struct ibv_qp_init_attr qp = small_qp(IBV_QPT_RC);
	qp.cap.max_send_wr = 1 << 30;
	EQ(rdma_create_qp(id, NULL, &qp), -1);
	TRUE(!id->qp && !id->send_cq && !id->recv_cq && !id->send_cq_channel && !id->recv_cq_channel && !qp.send_cq);
	qp = small_qp(IBV_QPT_UD);
	MINUS_ONE(rdma_create_qp(id, NULL, &qp), EINVAL);
	qp = small_qp(4711);
	MINUS_ONE(rdma_create_qp(id, NULL, &qp), EINVAL);
	struct ibv_context *other = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(other);
	qp = small_qp(IBV_QPT_RC);
	MINUS_ONE(rdma_create_qp(id, pd, &qp), EINVAL);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(other));

	char data[255] = { 0 };
	struct rdma_conn_param param = { .private_data = data, .private_data_len = 57, .qp_num = 0x123456 };
	MINUS_ONE(rdma_connect(id, &param), EINVAL);
	param.private_data_len = 255;
	MINUS_ONE(rdma_connect(id, &param), EINVAL);
	param.private_data_len = 56;
	param.responder_resources = 254;
	MINUS_ONE(rdma_connect(id, &param), EINVAL);
	param.responder_resources = 0;
	param.initiator_depth = 254;
	MINUS_ONE(rdma_connect(id, &param), EINVAL);
	param.initiator_depth = 0;
	param.private_data = NULL;
	param.private_data_len = 200;
	OK(rdma_connect(id, &param));
	MINUS_ONE(rdma_connect(id, &param), EINVAL);

	take_request(&c);
	param.private_data = data;
	MINUS_ONE(rdma_reject(c.passive, data, 149), EINVAL);
	param.private_data_len = 196;
	param.qp_num = 0x123457;
	OK(rdma_accept(c.passive, &param));
	MINUS_ONE(rdma_accept(c.passive, &param), EINVAL);
	struct rdma_cm_event *e = expect(c.active_channel, id, RDMA_CM_EVENT_CONNECT_RESPONSE);
	OK(rdma_ack_cm_event(e));
	MINUS_ONE(rdma_ack_cm_event(e), EINVAL);
	end_connection(&c);
}

/* As on Linux: who is asked cannot accept once more, and who asks need not wait. */
static void a_failed_accept_rejects(void)
{
	struct connection c = begin_connection("127.0.0.1");
	char data[255] = { 0 };
	struct rdma_conn_param param = { .qp_num = 0x123456 };
	OK(rdma_connect(c.active, &param));
	take_request(&c);
	param.private_data = data;
	param.private_data_len = 197;
	MINUS_ONE(rdma_accept(c.passive, &param), EINVAL);
	struct rdma_cm_event *e = expect(c.active_channel, c.active, RDMA_CM_EVENT_REJECTED);
	OK(rdma_ack_cm_event(e));
	param.private_data_len = 0;
	MINUS_ONE(rdma_accept(c.passive, &param), EINVAL);
	end_connection(&c);
}

/* A program that destroys the shared objects gets new ones. */
static void shared_objects(void)
{
	struct rdma_event_channel *c = channel();
	int n = -1;
	struct ibv_context **devices = rdma_get_devices(&n);
	TRUE(devices && devices[0] && !devices[1]);
	EQ(n, 1);
	struct rdma_cm_id *id = listener(c, "127.0.0.1", RDMA_PS_TCP, NULL);
	TRUE(id->verbs == devices[0]);
	struct ibv_context *ctx = devices[0];
	rdma_free_devices(devices);
	OK(ibv_dealloc_pd(id->pd));
	OK(rdma_destroy_id(id));
	OK(ibv_close_device(ctx));
	id = listener(c, "127.0.0.1", RDMA_PS_TCP, NULL);
	create_qp(id, IBV_QPT_RC);
	destroy_end(id);
	rdma_destroy_event_channel(c);
}

static void user_events(void)
{
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_TCP);
	MINUS_ONE(write_cm_event(id, RDMA_CM_EVENT_ESTABLISHED, 0, 0), EINVAL);
	OK(write_cm_event(id, RDMA_CM_EVENT_USER, -7, 0x1122334455667788));
	struct rdma_cm_event *e = expect(c, id, RDMA_CM_EVENT_USER);
	EQ(e->status, -7);
	uint64_t arg;
	memcpy(&arg, &e->param, sizeof arg);
	TRUE(arg == 0x1122334455667788);
	OK(rdma_ack_cm_event(e));
	/* One that waits goes with its id. */
	OK(write_cm_event(id, RDMA_CM_EVENT_USER, 0, 0));
	OK(rdma_destroy_id(id));
	EQ(readable(c, 0), 0);
	OK(fcntl(c->fd, F_SETFL, O_NONBLOCK));
	MINUS_ONE(rdma_get_cm_event(c, &e), EAGAIN);
	rdma_destroy_event_channel(c);
}

/* Which arguments are wrong is nothing that a compiler should find out here. */
int main(void)
{
	write_cm_event = dlsym(RTLD_DEFAULT, "rdma_write_cm_event");
	resolve_addrinfo = dlsym(RTLD_DEFAULT, "rdma_resolve_addrinfo");
	query_addrinfo = dlsym(RTLD_DEFAULT, "rdma_query_addrinfo");
	TRUE(write_cm_event && resolve_addrinfo && query_addrinfo);
	pointers();
	too_early();
	values();
	a_failed_accept_rejects();
	shared_objects();
	user_events();
	return 0;
}
