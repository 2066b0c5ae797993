/* Synchronous mode: rdma_create_ep, calls that wait for their event, and the inlines of rdma_verbs.h. */
#include "cm.h"

#include <pthread.h>

static struct rdma_addrinfo *find(const char *node, const char *service, int flags, int space)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = space }, *found = NULL;
	OK(rdma_getaddrinfo(node, service, &hints, &found));
	TRUE(found != NULL);
	return found;
}

struct server {
	struct rdma_cm_id *listen;
	pthread_t thread;
	void *(*serve)(void *);
};

static void *start(void *s)
{
	struct server *server = s;
	return server->serve(server);
}

/* A listening endpoint whose requests get a queue pair. */
static struct server serve(const char *ip, void *(*serve)(void *), struct ibv_qp_init_attr *qp)
{
	struct server s = { .serve = serve };
	struct rdma_addrinfo *res = find(ip, NULL, RAI_PASSIVE, RDMA_PS_TCP);
	OK(rdma_create_ep(&s.listen, res, NULL, qp));
	rdma_freeaddrinfo(res);
	OK(rdma_listen(s.listen, 4));
	TRUE(port_of(s.listen) != 0);
	return s;
}

static struct rdma_cm_id *client(const char *ip, uint16_t port, struct ibv_qp_init_attr *qp)
{
	char service[8];
	struct rdma_cm_id *id = NULL;
	snprintf(service, sizeof service, "%u", port);
	struct rdma_addrinfo *res = find(ip, service, 0, RDMA_PS_TCP);
	OK(rdma_create_ep(&id, res, NULL, qp));
	rdma_freeaddrinfo(res);
	TRUE(id && id->channel && id->verbs && id->pd);
	TRUE(id->event && id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED);
	return id;
}

static char in[2][32];

static void exchange(struct rdma_cm_id *id, int end, const char *says, const char *hears)
{
	struct ibv_wc wc;
	char out[32];
	strcpy(out, says);
	/* Inline: no region is needed. */
	OK(rdma_post_send(id, NULL, out, 16, NULL, IBV_SEND_INLINE));
	EQ(rdma_get_recv_comp(id, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(strcmp(in[end], hears), 0);
	EQ(rdma_get_send_comp(id, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
}

static void *answer(void *arg)
{
	struct server *s = arg;
	struct rdma_cm_id *id = NULL;
	OK(rdma_get_request(s->listen, &id));
	TRUE(id && id->qp && id->send_cq && id->recv_cq && id->event);
	EQ(id->event->event, RDMA_CM_EVENT_CONNECT_REQUEST);
	TRUE(id->event->id == id && id->event->listen_id == s->listen && id->channel != s->listen->channel);
	struct ibv_mr *mr = rdma_reg_msgs(id, in[0], sizeof in[0]);
	OK(rdma_post_recv(id, NULL, in[0], sizeof in[0], mr));
	/* The request's own parameters, which are acknowledged only then. */
	OK(rdma_accept(id, &id->event->param.conn));
	EQ(id->event->event, RDMA_CM_EVENT_ESTABLISHED);
	exchange(id, 0, "from the server", "from the client");
	OK(rdma_disconnect(id));
	EQ(id->event->event, RDMA_CM_EVENT_DISCONNECTED);
	OK(rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	return NULL;
}

static void connected(const char *ip)
{
	struct ibv_qp_init_attr qp = small_qp(0);
	struct server s = serve(ip, answer, &qp);
	OK(pthread_create(&s.thread, NULL, start, &s));
	qp = small_qp(0);
	struct rdma_cm_id *id = client(ip, port_of(s.listen), &qp);
	EQ(qp.qp_type, IBV_QPT_RC);
	TRUE(qp.cap.max_inline_data >= 16);
	struct ibv_mr *mr = rdma_reg_msgs(id, in[1], sizeof in[1]);
	OK(rdma_post_recv(id, NULL, in[1], sizeof in[1], mr));
	OK(rdma_connect(id, NULL));
	EQ(id->event->event, RDMA_CM_EVENT_ESTABLISHED);
	exchange(id, 1, "from the client", "from the server");
	OK(rdma_disconnect(id));
	OK(rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	OK(pthread_join(s.thread, NULL));
	rdma_destroy_ep(s.listen);
}

static void *refuse(void *arg)
{
	struct server *s = arg;
	struct rdma_cm_id *id;
	OK(rdma_get_request(s->listen, &id));
	TRUE(!id->qp);
	OK(rdma_reject(id, "no", 2));
	rdma_destroy_ep(id);
	return NULL;
}

/* A rejection is ECONNREFUSED, and the event says the rest. */
static void refused(void)
{
	struct server s = serve("127.0.0.1", refuse, NULL);
	OK(pthread_create(&s.thread, NULL, start, &s));
	struct ibv_qp_init_attr qp = small_qp(0);
	struct rdma_cm_id *id = client("127.0.0.1", port_of(s.listen), &qp);
	MINUS_ONE(rdma_connect(id, NULL), ECONNREFUSED);
	EQ(id->event->event, RDMA_CM_EVENT_REJECTED);
	EQ(id->event->status, 28);
	EQ(memcmp(id->event->param.conn.private_data, "no", 2), 0);
	rdma_destroy_ep(id);
	OK(pthread_join(s.thread, NULL));
	rdma_destroy_ep(s.listen);
}

/* RDMA READ and WRITE, an SRQ, and several of each. */
static void *lend(void *arg)
{
	struct server *s = arg;
	struct rdma_cm_id *id;
	static char memory[2][64] = { "to be read" };
	OK(rdma_get_request(s->listen, &id));
	struct ibv_mr *mr = rdma_reg_read(id, memory[0], 64), *written = rdma_reg_write(id, memory[1], 64);
	struct ibv_mr *msgs = rdma_reg_msgs(id, in[0], sizeof in[0]);
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	OK(rdma_create_srq(id, NULL, &srq));
	TRUE(id->srq && id->srq->pd == id->pd && srq.attr.max_wr >= 4);
	struct ibv_qp_init_attr qp = small_qp(IBV_QPT_RC);
	OK(rdma_create_qp(id, NULL, &qp));
	TRUE(id->qp->srq == id->srq && qp.srq == id->srq);
	/* In use. */
	rdma_destroy_srq(id);
	TRUE(id->srq != NULL);
	OK(rdma_post_recv(id, NULL, in[0], sizeof in[0], msgs));
	struct { uint64_t addr[2]; uint32_t rkey[2]; } where = {
		{ (uintptr_t)memory[0], (uintptr_t)memory[1] }, { mr->rkey, written->rkey } };
	struct rdma_conn_param p = { .private_data = &where, .private_data_len = sizeof where, .responder_resources = 4,
		.initiator_depth = 4, .rnr_retry_count = 7 };
	OK(rdma_accept(id, &p));
	struct ibv_wc wc;
	EQ(rdma_get_recv_comp(id, &wc), 1);
	EQ(strcmp(memory[1], "written"), 0);
	OK(rdma_disconnect(id));
	OK(rdma_dereg_mr(mr));
	OK(rdma_dereg_mr(written));
	OK(rdma_dereg_mr(msgs));
	rdma_destroy_ep(id);
	return NULL;
}

static void one_sided(void)
{
	struct server s = serve("127.0.0.1", lend, NULL);
	OK(pthread_create(&s.thread, NULL, start, &s));
	struct ibv_qp_init_attr qp = small_qp(0);
	struct rdma_cm_id *id = client("127.0.0.1", port_of(s.listen), &qp);
	static char buf[64];
	struct ibv_mr *mr = rdma_reg_msgs(id, buf, sizeof buf);
	struct ibv_wc wc;
	OK(rdma_connect(id, NULL));
	struct { uint64_t addr[2]; uint32_t rkey[2]; } where;
	memcpy(&where, id->event->param.conn.private_data, sizeof where);
	EQ(id->event->param.conn.srq, 1);
	OK(rdma_post_read(id, NULL, buf, sizeof buf, mr, 0, where.addr[0], where.rkey[0]));
	EQ(rdma_get_send_comp(id, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(strcmp(buf, "to be read"), 0);
	strcpy(buf, "written");
	OK(rdma_post_write(id, NULL, buf, sizeof buf, mr, 0, where.addr[1], where.rkey[1]));
	EQ(rdma_get_send_comp(id, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	OK(rdma_post_send(id, NULL, buf, 1, mr, 0));
	EQ(rdma_get_send_comp(id, &wc), 1);
	OK(rdma_disconnect(id));
	OK(rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	OK(pthread_join(s.thread, NULL));
	rdma_destroy_ep(s.listen);
}

/* Data that precedes the program's own, as a service may ask for. */
static void *check_private_data(void *arg)
{
	struct server *s = arg;
	struct rdma_cm_id *id;
	OK(rdma_get_request(s->listen, &id));
	EQ(memcmp(id->event->param.conn.private_data, "firstsecond", 11), 0);
	OK(rdma_reject(id, NULL, 0));
	rdma_destroy_ep(id);
	return NULL;
}

static void connect_data(void)
{
	struct server s = serve("127.0.0.1", check_private_data, NULL);
	OK(pthread_create(&s.thread, NULL, start, &s));
	char service[8];
	snprintf(service, sizeof service, "%u", port_of(s.listen));
	struct rdma_addrinfo *res = find("127.0.0.1", service, 0, RDMA_PS_TCP);
	char first[] = "first";
	res->ai_connect = first;
	res->ai_connect_len = 5;
	struct rdma_cm_id *id;
	OK(rdma_create_ep(&id, res, NULL, NULL));
	res->ai_connect = NULL;
	rdma_freeaddrinfo(res);
	struct rdma_conn_param p = { .private_data = "second", .private_data_len = 52, .qp_num = 0x123456 };
	char second[52] = "second";
	p.private_data = second;
	MINUS_ONE(rdma_connect(id, &p), EINVAL);
	p.private_data_len = 51;
	MINUS_ONE(rdma_connect(id, &p), ECONNREFUSED);
	rdma_destroy_ep(id);
	OK(pthread_join(s.thread, NULL));
	rdma_destroy_ep(s.listen);
}

/* Endpoints that cannot be, and a request that cannot have its queue pair. */
static void failures(void)
{
	struct rdma_cm_id *id = NULL;
	struct rdma_addrinfo res = { .ai_port_space = RDMA_PS_TCP, .ai_qp_type = IBV_QPT_RC };
	MINUS_ONE(rdma_create_ep(&id, &res, NULL, NULL), EINVAL);
	res.ai_flags = RAI_PASSIVE;
	MINUS_ONE(rdma_create_ep(&id, &res, NULL, NULL), EINVAL);
	struct sockaddr_storage a = address("127.0.0.1", 0);
	res.ai_src_addr = sa(&a);
	res.ai_src_len = 15;
	MINUS_ONE(rdma_create_ep(&id, &res, NULL, NULL), EINVAL);
	res.ai_src_len = 16;
	res.ai_qp_type = IBV_QPT_UD;
	MINUS_ONE(rdma_create_ep(&id, &res, NULL, NULL), EINVAL);
	res.ai_qp_type = 4711;
	MINUS_ONE(rdma_create_ep(&id, &res, NULL, NULL), EINVAL);
	res.ai_qp_type = IBV_QPT_RC;
	res.ai_port_space = 4711;
	MINUS_ONE(rdma_create_ep(&id, &res, NULL, NULL), EINVAL);
	TRUE(id == NULL);
	res.ai_port_space = RDMA_PS_TCP;
	struct ibv_qp_init_attr qp = small_qp(0);
	qp.cap.max_recv_wr = 1 << 30;
	OK(rdma_create_ep(&id, &res, NULL, &qp));
	OK(rdma_listen(id, 0));

	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *active = new_id(c, NULL, RDMA_PS_TCP), *new = NULL;
	resolve(active, "127.0.0.1", port_of(id));
	OK(rdma_connect(active, &(struct rdma_conn_param){ .qp_num = 0x123456 }));
	EQ(rdma_get_request(id, &new), -1);
	TRUE(new == NULL);
	struct rdma_cm_event *e = expect(c, active, RDMA_CM_EVENT_REJECTED);
	OK(rdma_ack_cm_event(e));
	OK(rdma_destroy_id(active));
	rdma_destroy_event_channel(c);
	rdma_destroy_ep(id);
}

int main(void)
{
	connected("127.0.0.1");
	connected("::1");
	refused();
	one_sided();
	connect_data();
	failures();
	return 0;
}
