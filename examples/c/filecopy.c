/* Copies a file from another machine, with a progress bar.
 *
 *   cc -o filecopy filecopy.c -libverbs -lrdmacm
 *   filecopy give FILE            offers the file to one client
 *   filecopy take HOST COPY       fetches it
 *
 * The client READs the file out of the memory of the other process, which does nothing meanwhile.
 */
#include <err.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

/* So many READs are under way at a time, each of so many bytes. */
enum { DEPTH = 4, PIECE = 1 << 20, WIDTH = 40 };

/* What the client needs to know of the file. It travels with the answer to its request for a connection. */
struct offer { uint64_t address, length; uint32_t rkey; };

static void check(int failed, const char *what)
{
	if (failed)
		err(1, "%s", what);
}

static const char *partial; /* the copy, until it is whole */

static void discard(void)
{
	struct stat status;
	if (partial && !stat(partial, &status) && S_ISREG(status.st_mode))
		unlink(partial);
}

static struct rdma_cm_id *create(const char *host)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = host ? 0 : RAI_PASSIVE }, *info;
	check(rdma_getaddrinfo(host, "7478", &hints, &info), "rdma_getaddrinfo");
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.sq_sig_all = 1, /* every READ makes a completion */
	};
	struct rdma_cm_id *id;
	check(rdma_create_ep(&id, info, NULL, &attr), "rdma_create_ep");
	rdma_freeaddrinfo(info);
	return id;
}

static void give(const char *name)
{
	int file = open(name, O_RDONLY);
	struct stat status;
	check(file < 0 || fstat(file, &status), name);
	size_t length = status.st_size;
	if (!S_ISREG(status.st_mode) || !length)
		errx(1, "%s: not a file, or an empty one", name);
	void *bytes = mmap(NULL, length, PROT_READ, MAP_PRIVATE, file, 0);
	check(bytes == MAP_FAILED, "mmap");
	struct rdma_cm_id *listener = create(NULL), *id;
	check(rdma_listen(listener, 0), "rdma_listen");
	printf("waiting for a client\n");
	fflush(stdout);
	check(rdma_get_request(listener, &id), "rdma_get_request");
	/* Registered so that the peer may READ it. */
	struct ibv_mr *mr = ibv_reg_mr(id->pd, bytes, length, IBV_ACCESS_REMOTE_READ);
	check(!mr, "ibv_reg_mr");
	struct offer offer = { htobe64((uintptr_t)bytes), htobe64(length), htobe32(mr->rkey) };
	struct rdma_conn_param param = {
		.private_data = &offer, .private_data_len = sizeof offer, .responder_resources = DEPTH,
	};
	check(rdma_accept(id, &param), "rdma_accept");
	/* The memory stays registered until the client has all of it, and parts. */
	struct rdma_cm_event *event;
	check(rdma_get_cm_event(id->channel, &event), "rdma_get_cm_event");
	rdma_ack_cm_event(event);
	rdma_disconnect(id);
	rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listener);
	munmap(bytes, length);
	close(file);
}

static void show(uint64_t done, uint64_t length)
{
	static const char full[] = "########################################";
	printf("\r[%-*.*s] %3d %%", WIDTH, (int)(WIDTH * done / length), full, (int)(100 * done / length));
	fflush(stdout);
}

static void take(const char *host, const char *name)
{
	struct rdma_cm_id *id = create(host);
	struct rdma_conn_param param = { .initiator_depth = DEPTH, .retry_count = 7 };
	check(rdma_connect(id, &param), "rdma_connect");
	struct offer offer;
	memcpy(&offer, id->event->param.conn.private_data, sizeof offer);
	uint64_t length = be64toh(offer.length), asked = 0, done = 0;
	static char pieces[DEPTH][PIECE];
	struct ibv_mr *mr = rdma_reg_msgs(id, pieces, sizeof pieces);
	check(!mr, "rdma_reg_msgs");
	int copy = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0666);
	check(copy < 0, name);
	partial = name;
	atexit(discard);
	while (done < length) {
		/* The READs complete in the order in which they were posted. */
		for (; asked < length && asked < done + DEPTH * PIECE; asked += PIECE) {
			uint64_t size = length - asked < PIECE ? length - asked : PIECE;
			check(rdma_post_read(id, NULL, pieces[asked / PIECE % DEPTH], size, mr, 0,
					     be64toh(offer.address) + asked, be32toh(offer.rkey)), "rdma_post_read");
		}
		struct ibv_wc wc;
		check(rdma_get_send_comp(id, &wc) < 0, "rdma_get_send_comp");
		if (wc.status)
			errx(1, "READ: %s", ibv_wc_status_str(wc.status));
		size_t size = length - done < PIECE ? length - done : PIECE;
		ssize_t written = write(copy, pieces[done / PIECE % DEPTH], size);
		check(written < 0, name);
		if (written != (ssize_t)size)
			errx(1, "%s: only %zd of %zu bytes were written", name, written, size);
		done += size;
		show(done, length);
	}
	check(close(copy), name);
	partial = NULL;
	printf("\n%s: %llu bytes\n", name, (unsigned long long)length);
	rdma_disconnect(id);
	rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "give"))
		give(argv[2]);
	else if (argc == 4 && !strcmp(argv[1], "take"))
		take(argv[2], argv[3]);
	else
		return fprintf(stderr, "usage: filecopy give FILE | filecopy take HOST COPY\n"), 2;
	return 0;
}
