/* rdma_getaddrinfo, at once and behind an event. */
#include "cm.h"

#include <dlfcn.h>
#include <infiniband/ib.h>
#include <netdb.h>

static void found(void)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *res = NULL;
	OK(rdma_getaddrinfo("127.0.0.1", "7471", &hints, &res));
	TRUE(res->ai_family == AF_INET && res->ai_port_space == RDMA_PS_TCP && res->ai_qp_type == IBV_QPT_RC);
	struct sockaddr_storage want = address("127.0.0.1", 7471);
	EQ(res->ai_dst_len, sizeof(struct sockaddr_in));
	EQ(memcmp(res->ai_dst_addr, &want, 8), 0);
	TRUE(!res->ai_src_addr && !res->ai_src_len && !res->ai_route && !res->ai_route_len && !res->ai_connect && !res->ai_next);
	rdma_freeaddrinfo(res);

	/* A source of the program's own. */
	struct sockaddr_storage from = address("127.0.0.2", 0);
	hints.ai_src_addr = sa(&from);
	hints.ai_src_len = sizeof(struct sockaddr_in);
	OK(rdma_getaddrinfo("127.0.0.1", "7471", &hints, &res));
	EQ(res->ai_src_len, hints.ai_src_len);
	EQ(memcmp(res->ai_src_addr, &from, 8), 0);
	TRUE(res->ai_src_addr != hints.ai_src_addr);
	rdma_freeaddrinfo(res);

	memset(&hints, 0, sizeof hints);
	hints.ai_flags = RAI_PASSIVE;
	hints.ai_port_space = RDMA_PS_UDP;
	OK(rdma_getaddrinfo(NULL, "7471", &hints, &res));
	TRUE(res->ai_flags == RAI_PASSIVE && res->ai_qp_type == IBV_QPT_UD && !res->ai_dst_addr && res->ai_src_addr);
	rdma_freeaddrinfo(res);

	hints.ai_flags = RAI_NUMERICHOST | RAI_FAMILY;
	hints.ai_family = AF_IB;
	OK(rdma_getaddrinfo("fe80::5", "7471", &hints, &res));
	struct sockaddr_ib *ib = (struct sockaddr_ib *)res->ai_dst_addr;
	EQ(res->ai_dst_len, sizeof *ib);
	TRUE(res->ai_family == AF_IB && ib->sib_family == AF_IB && ib->sib_addr.sib_raw[15] == 5);
	TRUE(be64toh(ib->sib_sid) == (RDMA_IB_IP_PS_UDP | 7471));
	rdma_freeaddrinfo(res);

	/* No hints at all. */
	OK(rdma_getaddrinfo("127.0.0.1", "7471", NULL, &res));
	TRUE(res->ai_family == AF_INET && res->ai_qp_type && res->ai_port_space);
	rdma_freeaddrinfo(res);
}

static void not_found(void)
{
	struct rdma_addrinfo hints = { 0 }, *res = (void *)1;
	MINUS_ONE(rdma_getaddrinfo(NULL, NULL, NULL, &res), EINVAL);
	MINUS_ONE(rdma_getaddrinfo("127.0.0.1", "1", NULL, NULL), EINVAL);
	hints.ai_flags = RAI_NUMERICHOST;
	EQ(rdma_getaddrinfo("a name", "1", &hints, &res), EAI_NONAME);
	hints.ai_flags = 0;
	hints.ai_family = AF_UNIX;
	EQ(rdma_getaddrinfo("127.0.0.1", "1", &hints, &res), EAI_FAMILY);
	hints.ai_family = 0;
	hints.ai_qp_type = IBV_QPT_UD;
	hints.ai_port_space = RDMA_PS_TCP;
	EQ(rdma_getaddrinfo("127.0.0.1", "1", &hints, &res), EAI_SOCKTYPE);
	hints.ai_qp_type = 0;
	EQ(rdma_getaddrinfo("127.0.0.1", "no service", &hints, &res), EAI_SERVICE);
	hints.ai_flags = 0x4000;
	EQ(rdma_getaddrinfo("127.0.0.1", "1", &hints, &res), EAI_BADFLAGS);
	hints.ai_flags = 0x10; /* RAI_SA */
	MINUS_ONE(rdma_getaddrinfo(NULL, "1", &hints, &res), EOPNOTSUPP);
	hints.ai_flags = 0;
	hints.ai_dst_len = 16;
	MINUS_ONE(rdma_getaddrinfo(NULL, NULL, &hints, &res), EINVAL);
	TRUE(res == (void *)1);
}

static void behind_an_event(void)
{
	int (*resolve_addrinfo)(struct rdma_cm_id *, const char *, const char *, const struct rdma_addrinfo *) =
		dlsym(RTLD_DEFAULT, "rdma_resolve_addrinfo");
	int (*query_addrinfo)(struct rdma_cm_id *, struct rdma_addrinfo **) = dlsym(RTLD_DEFAULT, "rdma_query_addrinfo");
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_TCP);
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *res;
	OK(resolve_addrinfo(id, "127.0.0.1", "7471", &hints));
	expect_ok(c, id, RDMA_CM_EVENT_ADDRINFO_RESOLVED);
	for (int i = 0; i < 2; i++) {
		OK(query_addrinfo(id, &res));
		EQ(ntohs(((struct sockaddr_in *)res->ai_dst_addr)->sin_port), 7471);
		rdma_freeaddrinfo(res);
	}
	hints.ai_flags = RAI_NUMERICHOST;
	OK(resolve_addrinfo(id, "a name", "7471", &hints));
	struct rdma_cm_event *e = expect(c, id, RDMA_CM_EVENT_ADDRINFO_ERROR);
	TRUE(e->status < 0);
	OK(rdma_ack_cm_event(e));
	hints.ai_flags = 0x10;
	MINUS_ONE(resolve_addrinfo(id, NULL, "1", &hints), EOPNOTSUPP);
	MINUS_ONE(resolve_addrinfo(id, NULL, NULL, NULL), EINVAL);
	/* Whoever is destroyed meanwhile hears nothing. */
	hints.ai_flags = 0;
	OK(resolve_addrinfo(id, "127.0.0.1", "7471", &hints));
	OK(rdma_destroy_id(id));
	/* In synchronous mode it is waited for. */
	id = new_id(NULL, NULL, RDMA_PS_TCP);
	OK(resolve_addrinfo(id, "127.0.0.1", "7471", &hints));
	OK(query_addrinfo(id, &res));
	rdma_freeaddrinfo(res);
	OK(rdma_destroy_id(id));
	rdma_destroy_event_channel(c);
}

int main(void)
{
	found();
	not_found();
	behind_an_event();
	return 0;
}
