/* The ways to register memory: device memory, null regions, on-demand paging, advice, allocated buffers. */
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <unistd.h>
#include "check.h"

#ifndef IBV_ACCESS_OPTIONAL_RANGE
#define IBV_ACCESS_OPTIONAL_RANGE 0x3ff00000
#endif

/* rdma-core 65; the header of Debian 12 has none of it. */
struct ibv_buf;
struct dmah { struct ibv_context *context; };
struct dmah_attr { uint32_t comp_mask, cpu_id; uint8_t ph, tph_mem_type; };
struct mr_attr {
	size_t length;
	int access;
	uint64_t comp_mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	struct dmah *dmah;
	struct ibv_buf *buf;
};
enum { IOVA = 1, ADDR = 2, FD = 4, FD_OFFSET = 8, DMAH = 16, OF_BUF = 32 };
struct dmah *ibv_alloc_dmah(struct ibv_context *context, struct dmah_attr *attr);
int ibv_dealloc_dmah(struct dmah *dmah);
int ibv_export_buf_dmabuf_fd(struct ibv_buf *buf);
struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct mr_attr *attr);
void *ibv_alloc_buf(struct ibv_pd *pd, size_t size, struct ibv_buf **buf);
void ibv_free_buf(struct ibv_buf *buf);
struct ibv_mr *ibv_reg_buf_mr(struct ibv_pd *pd, struct ibv_buf *buf, void *addr, size_t length, int access);
int ibv_dm_export_dmabuf_fd(struct ibv_dm *dm);

static const size_t PAGE = 4096;
static const int LOCAL = IBV_ACCESS_LOCAL_WRITE;

static void one_sided(struct end *e, enum ibv_wr_opcode opcode, struct ibv_sge sge, uint64_t va, uint32_t rkey)
{
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED }, *bad;
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = va, wr.wr.atomic.rkey = rkey, wr.wr.atomic.compare_add = 5;
	} else {
		wr.wr.rdma.remote_addr = va, wr.wr.rdma.rkey = rkey;
	}
	OK(ibv_post_send(e->qp, &wr, &bad));
	EQ(poll_one(e->cq).status, IBV_WC_SUCCESS);
}

static void what_cannot_be_registered(struct ibv_pd *pd)
{
	char *map = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	TRUE(map != MAP_FAILED);
	OK(mprotect(map + PAGE, PAGE, PROT_READ));
	struct ibv_mr *mr = ibv_reg_mr(pd, map, 3 * PAGE, 0);
	TRUE(mr != NULL);
	TRUE(mr->lkey != mr->rkey);
	OK(ibv_dereg_mr(mr));
	IS_NULL(ibv_reg_mr(pd, map, 3 * PAGE, LOCAL), EFAULT);
	OK(munmap(map + PAGE, PAGE));
	IS_NULL(ibv_reg_mr(pd, map, 3 * PAGE, 0), EFAULT);
	IS_NULL(ibv_reg_mr(pd, NULL, 1, 0), EFAULT);
	IS_NULL(ibv_reg_mr(pd, map, SIZE_MAX, 0), EINVAL);
	IS_NULL(ibv_reg_mr_iova(pd, map, PAGE, UINT64_MAX, 0), EINVAL);
	IS_NULL(ibv_reg_mr(NULL, map, PAGE, 0), EINVAL);
	IS_NULL(ibv_reg_mr(pd, map, PAGE, 1 << 12), EINVAL);
	IS_NULL(ibv_reg_mr(pd, map, PAGE, 1 << 16), EINVAL);
	IS_NULL(ibv_reg_mr(pd, map, PAGE, 1 << 30), EINVAL);
	IS_NULL(ibv_reg_mr(pd, map, PAGE, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	/* Optional flags are hints, known or not. */
	mr = ibv_reg_mr(pd, map, PAGE, LOCAL | IBV_ACCESS_RELAXED_ORDERING | IBV_ACCESS_OPTIONAL_RANGE);
	TRUE(mr != NULL);
	OK(ibv_dereg_mr(mr));
	/* No dma-bufs. */
	int fd = open("/dev/null", O_RDWR);
	IS_NULL(ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, LOCAL), EINVAL);
	IS_NULL(ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, -1, LOCAL), EBADF);
	IS_NULL(ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, INT_MAX, LOCAL), EBADF);
	IS_NULL(ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, IBV_ACCESS_ON_DEMAND), EOPNOTSUPP);
	close(fd);
	munmap(map, PAGE);
	munmap(map + 2 * PAGE, PAGE);
}

static void null_mr(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	struct ibv_mr *null = ibv_alloc_null_mr(pd);
	TRUE(null != NULL);
	EQ(null->rkey, 0);
	EQ(null->length, SIZE_MAX);
	memset(b.buf, 0xff, 64);
	struct ibv_sge nothing = { .addr = 12345, .length = 64, .lkey = null->lkey };
	one_sided(&a, IBV_WR_RDMA_READ, nothing, (uintptr_t)b.buf, b.mr->rkey);
	one_sided(&a, IBV_WR_RDMA_WRITE, nothing, (uintptr_t)b.buf, b.mr->rkey);
	for (int i = 0; i < 64; i++)
		EQ(b.buf[i], 0);
	/* Received into nothing. */
	struct ibv_recv_wr rwr = { .wr_id = 3, .sg_list = &nothing, .num_sge = 1 }, *bad;
	OK(ibv_post_recv(b.qp, &rwr, &bad));
	OK(post_send(&a, 1, 64, IBV_SEND_SIGNALED));
	EQ(poll_one(a.cq).status, IBV_WC_SUCCESS);
	EQ(poll_one(b.cq).byte_len, 64);
	EQ(ibv_rereg_mr(null, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, a.buf, 8, 0), IBV_REREG_MR_ERR_INPUT);
	EQ(errno, EINVAL);
	OK(ibv_dereg_mr(null));
	IS_NULL(ibv_alloc_null_mr(&(struct ibv_pd){ .context = pd->context }), EINVAL);
	free_end(&a), free_end(&b);
}

static void on_demand(struct ibv_pd *pd)
{
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	int access = LOCAL | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ON_DEMAND;
	struct ibv_mr *all = ibv_reg_mr(pd, NULL, SIZE_MAX, access);
	TRUE(all != NULL);
	memcpy(a.buf, "implicit", 8);
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 8, .lkey = all->lkey };
	one_sided(&a, IBV_WR_RDMA_WRITE, sge, (uintptr_t)b.buf, all->rkey);
	OK(memcmp(b.buf, "implicit", 8));
	IS_NULL(ibv_reg_mr_iova(pd, NULL, SIZE_MAX, 4096, access), EINVAL);
	IS_NULL(ibv_reg_mr(pd, a.buf, BUF, access | IBV_ACCESS_HUGETLB), EINVAL);

	/* The memory may come after the region. */
	char *map = mmap(NULL, 4 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *later = ibv_reg_mr(pd, map, 4 * PAGE, access);
	TRUE(later != NULL);
	struct ibv_sge range = { .addr = (uintptr_t)map, .length = 4 * PAGE, .lkey = later->lkey };
	const int flush = IBV_ADVISE_MR_FLAG_FLUSH;
	REFUSES(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, &range, 1), EFAULT);
	OK(mprotect(map, 4 * PAGE, PROT_READ));
	OK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, &range, 1));
	REFUSES(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, flush, &range, 1), EFAULT);
	OK(mprotect(map, 4 * PAGE, PROT_READ | PROT_WRITE));
	for (int f = 0; f <= flush; f++) {
		OK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, f, &range, 1));
		OK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, f, &range, 1));
		OK(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT, f, &range, 1));
	}
	one_sided(&a, IBV_WR_RDMA_WRITE, sge, (uintptr_t)map + PAGE, later->rkey);
	OK(memcmp(map + PAGE, "implicit", 8));

	struct ibv_sge wrong[] = { range, range, range };
	wrong[0].length++;
	wrong[1].lkey = a.mr->lkey, wrong[1].addr = (uintptr_t)a.buf, wrong[1].length = 8;
	wrong[2].lkey = 0;
	for (int i = 0; i < 3; i++)
		REFUSES(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, &wrong[i], 1), EFAULT);
	struct ibv_pd *other = ibv_alloc_pd(pd->context);
	REFUSES(ibv_advise_mr(other, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, &range, 1), EFAULT);
	OK(ibv_dealloc_pd(other));
	REFUSES(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 2, &range, 1), EINVAL);
	REFUSES(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, NULL, 1), EINVAL);
	REFUSES(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, flush, &range, 0), EINVAL);
	REFUSES(ibv_advise_mr(pd, 77, flush, &range, 1), ENOTSUP);
	OK(ibv_dereg_mr(later));
	OK(ibv_dereg_mr(all));
	munmap(map, 4 * PAGE);
	free_end(&a), free_end(&b);
}

static void device_memory(struct ibv_pd *pd, uint64_t max)
{
	struct ibv_context *ctx = pd->context;
	struct ibv_alloc_dm_attr attr = { .length = 4096, .log_align_req = 6 };
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &attr);
	TRUE(dm != NULL);
	TRUE(dm->context == ctx && dm->handle != 0);
	char data[64] = "device memory", back[64];
	OK(ibv_memcpy_to_dm(dm, 128, data, 64));
	OK(ibv_memcpy_from_dm(back, dm, 128, 64));
	OK(memcmp(data, back, 64));
	REFUSES(ibv_memcpy_to_dm(dm, 1, data, 64), EINVAL);
	REFUSES(ibv_memcpy_to_dm(dm, 4, data, 63), EINVAL);
	REFUSES(ibv_memcpy_to_dm(dm, 4096, data, 4), EINVAL);
	REFUSES(ibv_memcpy_from_dm(back, dm, 4, 4096), EINVAL);
	REFUSES(ibv_memcpy_from_dm(back, dm, UINT64_MAX - 3, 8), EINVAL);
	REFUSES(ibv_memcpy_to_dm(dm, 0, NULL, 64), EFAULT);

	const int zero = IBV_ACCESS_ZERO_BASED;
	IS_NULL(ibv_reg_dm_mr(pd, dm, 0, 4096, LOCAL), EINVAL);
	IS_NULL(ibv_reg_dm_mr(pd, dm, 4, 4096, LOCAL | zero), EINVAL);
	IS_NULL(ibv_reg_dm_mr(pd, dm, UINT64_MAX, 4096, LOCAL | zero), EINVAL);
	IS_NULL(ibv_reg_dm_mr(pd, NULL, 0, 4096, LOCAL | zero), EINVAL);
	int all = LOCAL | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | zero;
	struct ibv_mr *mr = ibv_reg_dm_mr(pd, dm, 128, 1024, all);
	TRUE(mr != NULL);
	struct end a = make_end(pd, IBV_QPT_RC), b = make_end(pd, IBV_QPT_RC);
	connect_ends(&a, &b);
	struct ibv_sge sge = { .addr = (uintptr_t)a.buf, .length = 64, .lkey = a.mr->lkey };
	one_sided(&a, IBV_WR_RDMA_READ, sge, 0, mr->rkey);
	OK(memcmp(a.buf, data, 64));
	uint64_t seven = 7;
	OK(ibv_memcpy_to_dm(dm, 256, &seven, 8));
	sge.length = 8;
	one_sided(&a, IBV_WR_ATOMIC_FETCH_AND_ADD, sge, 128, mr->rkey);
	OK(ibv_memcpy_from_dm(&seven, dm, 256, 8));
	EQ(seven, 12);
	/* As the local side. */
	struct ibv_sge dev = { .addr = 512, .length = 64, .lkey = mr->lkey };
	one_sided(&a, IBV_WR_RDMA_WRITE, dev, (uintptr_t)b.buf, b.mr->rkey);

	REFUSES(ibv_free_dm(dm), EBUSY);
	OK(ibv_dereg_mr(mr));
	int fd = ibv_dm_export_dmabuf_fd(dm);
	if (fd < 0)
		EQ(errno, EOPNOTSUPP);
	else
		close(fd);
	OK(ibv_free_dm(dm));
	attr = (struct ibv_alloc_dm_attr){ .length = max };
	dm = ibv_alloc_dm(ctx, &attr);
	TRUE(dm != NULL);
	struct ibv_alloc_dm_attr one = { .length = 1 };
	IS_NULL(ibv_alloc_dm(ctx, &one), ENOMEM);
	OK(ibv_free_dm(dm));
	attr.length = max + 1;
	IS_NULL(ibv_alloc_dm(ctx, &attr), ENOMEM);
	attr.length = 0;
	IS_NULL(ibv_alloc_dm(ctx, &attr), EINVAL);
	attr.length = 4, attr.log_align_req = 40;
	IS_NULL(ibv_alloc_dm(ctx, &attr), EINVAL);
	attr.log_align_req = 0, attr.comp_mask = 1;
	IS_NULL(ibv_alloc_dm(ctx, &attr), EINVAL);
	free_end(&a), free_end(&b);
}

static void buffers(struct ibv_pd *pd)
{
	struct ibv_pd *other = ibv_alloc_pd(pd->context);
	struct ibv_buf *buf = NULL;
	char *at = ibv_alloc_buf(other, 10000, &buf);
	TRUE(at && buf);
	EQ((uintptr_t)at % PAGE, 0);
	memset(at, 1, 10000);
	REFUSES(ibv_dealloc_pd(other), EBUSY);
	IS_NULL(ibv_reg_buf_mr(pd, buf, at, 100, LOCAL), EINVAL);
	IS_NULL(ibv_reg_buf_mr(other, buf, at, 10001, LOCAL), EINVAL);
	IS_NULL(ibv_reg_buf_mr(other, buf, at - 1, 1, LOCAL), EINVAL);
	IS_NULL(ibv_reg_buf_mr(other, NULL, at, 1, LOCAL), EINVAL);
	struct ibv_mr *mr = ibv_reg_buf_mr(other, buf, at + 8, 9992, LOCAL);
	TRUE(mr && mr->addr == at + 8);
	MINUS_ONE(ibv_export_buf_dmabuf_fd(buf), ENODATA);
	MINUS_ONE(ibv_export_buf_dmabuf_fd(NULL), EINVAL);

	struct dmah_attr hints = { .comp_mask = 7, .cpu_id = 0, .ph = 1, .tph_mem_type = 0 };
	struct dmah *dmah = ibv_alloc_dmah(pd->context, &hints);
	TRUE(dmah && dmah->context == pd->context);
	hints.cpu_id = 1 << 20;
	IS_NULL(ibv_alloc_dmah(pd->context, &hints), EINVAL);
	hints.comp_mask = 8;
	IS_NULL(ibv_alloc_dmah(pd->context, &hints), EINVAL);
	IS_NULL(ibv_alloc_dmah(pd->context, NULL), EINVAL);

	struct mr_attr ex = { .length = 100, .access = LOCAL, .comp_mask = ADDR | OF_BUF | DMAH | IOVA, .iova = 0x1000,
			      .addr = at, .dmah = dmah, .buf = buf };
	struct ibv_mr *second = ibv_reg_mr_ex(other, &ex);
	TRUE(second != NULL);
	REFUSES(ibv_dealloc_dmah(dmah), EBUSY);
	/* Hints and on-demand paging exclude each other. */
	ex.access |= IBV_ACCESS_ON_DEMAND;
	IS_NULL(ibv_reg_mr_ex(other, &ex), EOPNOTSUPP);
	ex.access = LOCAL;
	ex.comp_mask |= FD;
	IS_NULL(ibv_reg_mr_ex(other, &ex), EINVAL);
	ex.comp_mask = OF_BUF;
	IS_NULL(ibv_reg_mr_ex(other, &ex), EINVAL);
	ex.comp_mask = ADDR | FD_OFFSET;
	IS_NULL(ibv_reg_mr_ex(other, &ex), EINVAL);
	ex.comp_mask = ADDR | 64;
	IS_NULL(ibv_reg_mr_ex(other, &ex), EINVAL);
	IS_NULL(ibv_reg_mr_ex(other, NULL), EINVAL);
	ex.comp_mask = FD, ex.fd = -1;
	IS_NULL(ibv_reg_mr_ex(other, &ex), EBADF);
	ex.comp_mask = ADDR, ex.addr = NULL;
	IS_NULL(ibv_reg_mr_ex(other, &ex), EFAULT);
	OK(ibv_dereg_mr(second));
	OK(ibv_dealloc_dmah(dmah));
	REFUSES(ibv_dealloc_dmah(dmah), EINVAL);
	/* A region keeps the memory of a buffer that was freed. */
	ibv_free_buf(buf);
	EQ(at[9999], 1);
	OK(ibv_dereg_mr(mr));
	IS_NULL(ibv_alloc_buf(other, 0, &buf), EINVAL);
	IS_NULL(ibv_alloc_buf(other, 10, NULL), EINVAL);
	IS_NULL(ibv_alloc_buf(NULL, 10, &buf), EINVAL);
	OK(ibv_dealloc_pd(other));
}

int main(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_device_attr_ex attr;
	OK(ibv_query_device_ex(ctx, NULL, &attr));
	EQ(attr.odp_caps.general_caps, IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
	TRUE(attr.odp_caps.per_transport_caps.rc_odp_caps & IBV_ODP_SUPPORT_ATOMIC);
	TRUE(attr.max_dm_size > 0);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	what_cannot_be_registered(pd);
	null_mr(pd);
	on_demand(pd);
	device_memory(pd, attr.max_dm_size);
	buffers(pd);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
	return 0;
}
