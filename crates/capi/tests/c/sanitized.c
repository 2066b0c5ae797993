/*
 * Built with MemorySanitizer, ThreadSanitizer or AddressSanitizer.
 *
 *   sanitized right      two threads send to each other, and read what came; nothing is to be reported
 *   sanitized undefined  reads memory that neither the program nor the device has written
 *   sanitized race       two threads write one variable, and no completion orders them
 *   sanitized leak       forgets what it has allocated
 *   sanitized objects    leaves the objects of the device that it has made
 */
#include <pthread.h>

#include "check.h"

enum { ROUNDS = 200, LEN = 3000 };

static struct end a, b;
/* Written by the thread that posts, and read by the one that polls. */
static int round_of_a, round_of_b;
static int unordered;

static void sum_is(const char *data, int value)
{
	long sum = 0;
	for (int i = 0; i < LEN; i++)
		sum += data[i];
	EQ(sum, (long)LEN * value);
}

static void answer_all(void)
{
	for (int i = 0; i < ROUNDS; i++) {
		struct ibv_wc wc = poll_one(b.cq);
		EQ(wc.opcode, IBV_WC_RECV);
		EQ(wc.byte_len, LEN);
		EQ(wc.wc_flags, 0);
		EQ(round_of_a, i);
		sum_is(b.buf, i % 100);
		OK(post_recv(&b, 0, LEN));
		memset(b.buf, i % 100 + 1, LEN);
		round_of_b = i;
		OK(post_send(&b, 0, LEN, IBV_SEND_SIGNALED));
		EQ(poll_one(b.cq).opcode, IBV_WC_SEND);
	}
}

static void *answer(void *race)
{
	if (race)
		unordered++;
	else
		answer_all();
	return NULL;
}

static void ask_all(void)
{
	for (int i = 0; i < ROUNDS; i++) {
		OK(post_recv(&a, 0, LEN));
		memset(a.buf, i % 100, LEN);
		round_of_a = i;
		OK(post_send(&a, 0, LEN, IBV_SEND_SIGNALED));
		/* The answer may come before the end of the send is seen. */
		EQ(poll_one(a.cq).opcode + poll_one(a.cq).opcode, IBV_WC_SEND + IBV_WC_RECV);
		EQ(round_of_b, i);
		sum_is(a.buf, i % 100 + 1);
	}
}

/* Every field that the library writes decides something. */
static void ask_the_device(struct ibv_context *ctx)
{
	struct ibv_device_attr device;
	OK(ibv_query_device(ctx, &device));
	TRUE(device.max_qp > 0 && device.phys_port_cnt == 1 && strlen(device.fw_ver) < sizeof device.fw_ver);
	struct ibv_device_attr_ex more;
	OK(ibv_query_device_ex(ctx, NULL, &more));
	TRUE(more.orig_attr.max_qp == device.max_qp && more.max_dm_size < UINT64_MAX);
	struct ibv_port_attr port;
	OK(ibv_query_port(ctx, 1, &port));
	TRUE(port.state == IBV_PORT_ACTIVE && port.gid_tbl_len > 0);
	struct ibv_gid_entry gid;
	OK(ibv_query_gid_ex(ctx, 1, 0, &gid, 0));
	TRUE(gid.gid_type == IBV_GID_TYPE_ROCE_V2 && memcmp(&gid.gid, &(union ibv_gid){ 0 }, sizeof gid.gid) != 0);
	uint16_t pkey;
	OK(ibv_query_pkey(ctx, 1, 0, &pkey));
	EQ(pkey, 0xffff);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	OK(ibv_query_qp(a.qp, &attr, IBV_QP_STATE | IBV_QP_CAP, &init));
	TRUE(attr.qp_state == IBV_QPS_RTS && attr.cap.max_send_wr >= 8 && init.qp_type == IBV_QPT_RC);
}

/* Its memory is the device's to write: the program never does. */
static struct end fresh_end(struct ibv_pd *pd)
{
	struct end e = make_end(pd, IBV_QPT_RC);
	OK(ibv_dereg_mr(e.mr));
	free(e.buf);
	e.buf = malloc(BUF);
	e.mr = ibv_reg_mr(pd, e.buf, BUF, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
	TRUE(e.mr != NULL);
	return e;
}

static void right(struct ibv_context *ctx, struct ibv_pd *pd)
{
	a = fresh_end(pd);
	b = fresh_end(pd);
	connect_ends(&a, &b);
	ask_the_device(ctx);
	pthread_t thread;
	OK(post_recv(&b, 0, LEN));
	OK(pthread_create(&thread, NULL, answer, NULL));
	ask_all();
	OK(pthread_join(thread, NULL));
	memset(a.buf, 5, LEN);
	struct ibv_sge sge = { (uintptr_t)a.buf, LEN, a.mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.rdma.remote_addr = (uintptr_t)b.buf;
	wr.wr.rdma.rkey = b.mr->rkey;
	OK(ibv_post_send(a.qp, &wr, &bad));
	poll_one(a.cq);
	sum_is(b.buf, 5);
	wr.opcode = IBV_WR_RDMA_READ;
	sge.addr = (uintptr_t)a.buf + 2 * LEN;
	OK(ibv_post_send(a.qp, &wr, &bad));
	poll_one(a.cq);
	sum_is(a.buf + 2 * LEN, 5);
	free_end(&a);
	free_end(&b);
}

int main(int argc, char **argv)
{
	EQ(argc, 2);
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	TRUE(pd != NULL);
	if (strcmp(argv[1], "right") == 0) {
		right(ctx, pd);
	} else if (strcmp(argv[1], "undefined") == 0) {
		char *nobodys = malloc(64);
		if (nobodys[7] > 0)
			puts("positive");
		free(nobodys);
	} else if (strcmp(argv[1], "objects") == 0) {
		a = make_end(pd, IBV_QPT_RC);
		return 0;
	} else if (strcmp(argv[1], "leak") == 0) {
		for (int n = 0; n < 10; n++)
			printf("%p\n", malloc(64));
	} else {
		pthread_t thread;
		OK(pthread_create(&thread, NULL, answer, &unordered));
		unordered++;
		OK(pthread_join(thread, NULL));
	}
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
