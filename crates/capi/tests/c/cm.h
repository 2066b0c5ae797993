/* What the tests of librdmacm share: ids, events, and a connection within the process. */
#ifndef CM_H
#define CM_H

#include "check.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <unistd.h>

/* Newer than the headers of Debian 12. */
#define RDMA_CM_EVENT_ADDRINFO_RESOLVED 16
#define RDMA_CM_EVENT_ADDRINFO_ERROR 17
#define RDMA_CM_EVENT_USER 18

static inline struct sockaddr_storage address(const char *ip, uint16_t port)
{
	struct sockaddr_storage s = { 0 };
	struct sockaddr_in *v4 = (struct sockaddr_in *)&s;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&s;
	if (inet_pton(AF_INET, ip, &v4->sin_addr) == 1) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(port);
	} else {
		EQ(inet_pton(AF_INET6, ip, &v6->sin6_addr), 1);
		v6->sin6_family = AF_INET6;
		v6->sin6_port = htons(port);
	}
	return s;
}

static inline struct sockaddr *sa(struct sockaddr_storage *s)
{
	return (struct sockaddr *)s;
}

static inline struct rdma_event_channel *channel(void)
{
	struct rdma_event_channel *c = rdma_create_event_channel();
	TRUE(c != NULL && c->fd >= 0);
	return c;
}

static inline struct rdma_cm_id *new_id(struct rdma_event_channel *c, void *context, enum rdma_port_space ps)
{
	struct rdma_cm_id *id = NULL;
	OK(rdma_create_id(c, &id, context, ps));
	TRUE(id != NULL && id->context == context && id->ps == ps && !id->verbs && !id->qp && !id->pd);
	TRUE(c ? id->channel == c : id->channel != NULL);
	EQ(id->qp_type, ps == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC);
	return id;
}

static inline int readable(struct rdma_event_channel *c, int ms)
{
	struct pollfd p = { .fd = c->fd, .events = POLLIN };
	return poll(&p, 1, ms);
}

/* The next event, which must be of this type and, if not NULL, of this id. */
static inline struct rdma_cm_event *expect(struct rdma_event_channel *c, struct rdma_cm_id *id, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *e = NULL;
	EQ(readable(c, 10000), 1);
	OK(rdma_get_cm_event(c, &e));
	TRUE(e != NULL);
	if (e->event != type)
		fprintf(stderr, "%s, status %d\n", rdma_event_str(e->event), e->status);
	EQ(e->event, type);
	if (id)
		TRUE(e->id == id);
	return e;
}

/* As expect, of status 0, and acknowledged. */
static inline void expect_ok(struct rdma_event_channel *c, struct rdma_cm_id *id, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *e = expect(c, id, type);
	EQ(e->status, 0);
	OK(rdma_ack_cm_event(e));
}

static inline void resolve(struct rdma_cm_id *id, const char *ip, uint16_t port)
{
	struct sockaddr_storage to = address(ip, port);
	OK(rdma_resolve_addr(id, NULL, sa(&to), 2000));
	expect_ok(id->channel, id, RDMA_CM_EVENT_ADDR_RESOLVED);
	OK(rdma_resolve_route(id, 2000));
	expect_ok(id->channel, id, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static inline struct rdma_cm_id *listener(struct rdma_event_channel *c, const char *ip, enum rdma_port_space ps, void *context)
{
	struct rdma_cm_id *id = new_id(c, context, ps);
	struct sockaddr_storage at = address(ip, 0);
	OK(rdma_bind_addr(id, sa(&at)));
	TRUE(rdma_get_src_port(id) != 0);
	OK(rdma_listen(id, 0));
	return id;
}

static inline struct ibv_qp_init_attr small_qp(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr a = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 16 },
		.qp_type = type,
		.sq_sig_all = 1,
	};
	return a;
}

static inline void create_qp(struct rdma_cm_id *id, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr a = small_qp(type);
	OK(rdma_create_qp(id, NULL, &a));
	TRUE(id->qp && id->qp->pd == id->pd && id->qp->context == id->verbs);
	TRUE(id->send_cq && id->recv_cq && id->send_cq_channel && id->recv_cq_channel);
	TRUE(a.send_cq == id->send_cq && a.recv_cq == id->recv_cq);
	EQ(id->qp->state, type == IBV_QPT_UD ? IBV_QPS_RTS : IBV_QPS_INIT);
}

static inline enum ibv_qp_state state_of(struct ibv_qp *qp)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	OK(ibv_query_qp(qp, &a, IBV_QP_STATE, &i));
	return a.qp_state;
}

static inline uint16_t port_of(struct rdma_cm_id *id)
{
	return ntohs(rdma_get_src_port(id));
}

/* Both ends of a connection on one channel each. */
struct connection {
	struct rdma_event_channel *active_channel, *passive_channel;
	struct rdma_cm_id *listener, *active, *passive;
};

static inline struct connection begin_connection(const char *ip)
{
	struct connection c = { channel(), channel() };
	c.listener = listener(c.passive_channel, ip, RDMA_PS_TCP, NULL);
	c.active = new_id(c.active_channel, NULL, RDMA_PS_TCP);
	resolve(c.active, ip, port_of(c.listener));
	return c;
}

static inline struct rdma_cm_id *take_request(struct connection *c)
{
	struct rdma_cm_event *e = expect(c->passive_channel, NULL, RDMA_CM_EVENT_CONNECT_REQUEST);
	TRUE(e->listen_id == c->listener && e->id != c->listener);
	c->passive = e->id;
	OK(rdma_ack_cm_event(e));
	return c->passive;
}

static inline struct connection make_connection(const char *ip)
{
	struct connection c = begin_connection(ip);
	create_qp(c.active, IBV_QPT_RC);
	OK(rdma_connect(c.active, NULL));
	take_request(&c);
	create_qp(c.passive, IBV_QPT_RC);
	OK(rdma_accept(c.passive, NULL));
	expect_ok(c.active_channel, c.active, RDMA_CM_EVENT_ESTABLISHED);
	expect_ok(c.passive_channel, c.passive, RDMA_CM_EVENT_ESTABLISHED);
	EQ(c.active->qp->state, IBV_QPS_RTS);
	EQ(c.passive->qp->state, IBV_QPS_RTS);
	return c;
}

static inline void destroy_end(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	TRUE(!id->qp && !id->send_cq && !id->recv_cq && !id->send_cq_channel && !id->recv_cq_channel);
	OK(rdma_destroy_id(id));
}

static inline void end_connection(struct connection *c)
{
	destroy_end(c->active);
	if (c->passive)
		destroy_end(c->passive);
	OK(rdma_destroy_id(c->listener));
	rdma_destroy_event_channel(c->active_channel);
	rdma_destroy_event_channel(c->passive_channel);
}

/* A message each way, with the inlines of rdma_verbs.h. */
static inline void talk_one_way(struct rdma_cm_id *from, struct rdma_cm_id *to, const char *text)
{
	char out[64], in[64] = { 0 };
	struct ibv_wc wc;
	strcpy(out, text);
	struct ibv_mr *send = rdma_reg_msgs(from, out, sizeof out), *recv = rdma_reg_msgs(to, in, sizeof in);
	TRUE(send && recv);
	OK(rdma_post_recv(to, in, in, sizeof in, recv));
	OK(rdma_post_send(from, out, out, sizeof out, send, 0));
	EQ(rdma_get_send_comp(from, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	TRUE(wc.wr_id == (uintptr_t)out);
	EQ(rdma_get_recv_comp(to, &wc), 1);
	EQ(wc.status, IBV_WC_SUCCESS);
	TRUE(wc.wr_id == (uintptr_t)in);
	EQ(wc.byte_len, sizeof out);
	EQ(strcmp(in, text), 0);
	OK(rdma_dereg_mr(send));
	OK(rdma_dereg_mr(recv));
}

static inline void talk(struct rdma_cm_id *a, struct rdma_cm_id *b)
{
	talk_one_way(a, b, "there");
	talk_one_way(b, a, "and back");
}

#endif
