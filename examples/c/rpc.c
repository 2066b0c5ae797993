/* Remote procedure calls: a client sends numbers, the server answers with their sums.
 *
 *   cc -o rpc rpc.c -libverbs -lrdmacm
 *   rpc serve CALLS          answers so many calls of one client
 *   rpc call HOST A,B,... .. calls once for each list
 */
#include <arpa/inet.h>
#include <ctype.h>
#include <err.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

/* What travels is in network byte order. A reply names its request, so that several could be under way. */
enum { MOST = 30 };
struct request { uint32_t id, count, numbers[MOST]; };
struct reply { uint32_t id, sum; };

static void check(int failed, const char *what)
{
	if (failed)
		err(1, "%s", what);
}

static struct rdma_cm_id *create(const char *host)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = host ? 0 : RAI_PASSIVE };
	struct rdma_addrinfo *info;
	check(rdma_getaddrinfo(host, "7472", &hints, &info), "rdma_getaddrinfo");
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.sq_sig_all = 1,
	};
	struct rdma_cm_id *id;
	check(rdma_create_ep(&id, info, NULL, &attr), "rdma_create_ep");
	rdma_freeaddrinfo(info);
	return id;
}

/* Waits for a completion; tells how many bytes came. */
static uint32_t finish(int (*completion)(struct rdma_cm_id *, struct ibv_wc *), struct rdma_cm_id *id)
{
	struct ibv_wc wc;
	check(completion(id, &wc) < 0, "completion");
	if (wc.status != IBV_WC_SUCCESS)
		errx(1, "completion: %s", ibv_wc_status_str(wc.status));
	return wc.byte_len;
}

static void serve(int calls)
{
	struct rdma_cm_id *listener = create(NULL), *id;
	check(rdma_listen(listener, 0), "rdma_listen");
	printf("waiting for calls\n");
	fflush(stdout);
	check(rdma_get_request(listener, &id), "rdma_get_request");
	struct request request;
	struct reply reply;
	struct ibv_mr *in = rdma_reg_msgs(id, &request, sizeof request);
	struct ibv_mr *out = rdma_reg_msgs(id, &reply, sizeof reply);
	check(!in || !out, "rdma_reg_msgs");
	check(rdma_post_recv(id, NULL, &request, sizeof request, in), "rdma_post_recv");
	check(rdma_accept(id, NULL), "rdma_accept");
	for (; calls > 0; calls--) {
		uint32_t bytes = finish(rdma_get_recv_comp, id), sum = 0;
		uint32_t count = ntohl(request.count);
		/* A peer's message is data: look before you believe. */
		if (bytes < 8 || count > MOST || bytes != 8 + 4 * count)
			errx(1, "a request of %u bytes that is none", bytes);
		for (uint32_t i = 0; i < count; i++)
			sum += ntohl(request.numbers[i]);
		reply = (struct reply){ request.id, htonl(sum) };
		/* The next request may come as soon as the reply is there. */
		check(rdma_post_recv(id, NULL, &request, sizeof request, in), "rdma_post_recv");
		check(rdma_post_send(id, NULL, &reply, sizeof reply, out, 0), "rdma_post_send");
		finish(rdma_get_send_comp, id);
	}
	rdma_disconnect(id);
	rdma_dereg_mr(in);
	rdma_dereg_mr(out);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listener);
}

/* Reads `A,B,...` and tells how many numbers that has; 0 if it is something else. */
static uint32_t parse(const char *text, uint32_t *numbers)
{
	uint32_t count = 0;
	do {
		char *end;
		unsigned long number = strtoul(text, &end, 10);
		if (!isdigit((unsigned char)*text) || number > UINT32_MAX || count == MOST)
			return 0;
		numbers[count++] = htonl(number);
		text = end;
	} while (*text++ == ',');
	return text[-1] ? 0 : count;
}

static void call(const char *host, char **lists)
{
	struct rdma_cm_id *id = create(host);
	struct request request;
	struct reply reply;
	struct ibv_mr *out = rdma_reg_msgs(id, &request, sizeof request);
	struct ibv_mr *in = rdma_reg_msgs(id, &reply, sizeof reply);
	check(!in || !out, "rdma_reg_msgs");
	check(rdma_connect(id, NULL), "rdma_connect");
	for (uint32_t number = 1; *lists; lists++, number++) {
		printf("sum(%s) = ", *lists);
		uint32_t count = parse(*lists, request.numbers);
		request.id = htonl(number);
		request.count = htonl(count);
		check(rdma_post_recv(id, NULL, &reply, sizeof reply, in), "rdma_post_recv");
		check(rdma_post_send(id, NULL, &request, 8 + 4 * count, out, 0), "rdma_post_send");
		finish(rdma_get_send_comp, id);
		if (finish(rdma_get_recv_comp, id) != sizeof reply || reply.id != request.id)
			errx(1, "not a reply to this request");
		printf("%u\n", ntohl(reply.sum));
	}
	rdma_disconnect(id);
	rdma_dereg_mr(in);
	rdma_dereg_mr(out);
	rdma_destroy_ep(id);
}

int main(int argc, char **argv)
{
	int calls, lists = 0; char rest;
	uint32_t numbers[MOST];
	while (3 + lists < argc && parse(argv[3 + lists], numbers))
		lists++;
	if (argc == 3 && !strcmp(argv[1], "serve") && sscanf(argv[2], "%9d%c", &calls, &rest) == 1 && calls > 0)
		serve(calls);
	else if (lists && argc == 3 + lists && !strcmp(argv[1], "call"))
		call(argv[2], argv + 3);
	else
		return fprintf(stderr, "usage: rpc serve CALLS | rpc call HOST A,B,...\n"), 2;
	return 0;
}
