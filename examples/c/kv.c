/* A key-value store whose clients look values up by one-sided READs. The server's processor does nothing for a lookup.
 *
 *   cc -o kv kv.c -libverbs -lrdmacm
 *   kv serve CLIENTS KEY=VALUE ...   ends after so many clients
 *   kv get HOST KEY ...
 *
 * The table is an array of slots. A key's hash says where the search for it begins; the search ends at an empty slot.
 */
#include <err.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

enum { SLOTS = 1024, KEY = 40, VALUE = 80, TRIES = 1000 };

/* Two strings and their checksum, which is 0 if the slot is empty. Both machines have the same order of bytes. */
struct slot { uint64_t sum; char key[KEY], value[VALUE]; };

/* What a client needs to know of the table. It travels with the answer to its request for a connection. */
struct offer { uint64_t address; uint32_t rkey; };

static void check(int failed, const char *what)
{
	if (failed)
		err(1, "%s", what);
}

/* FNV-1a. Both sides compute it. */
static uint64_t hash(const void *bytes, size_t len)
{
	uint64_t sum = 0xcbf29ce484222325;
	for (const uint8_t *byte = bytes; len > 0; len--)
		sum = (sum ^ *byte++) * 0x100000001b3;
	return sum ? sum : 1;
}

static uint64_t sum_of(const struct slot *slot)
{
	return hash(slot->key, KEY + VALUE);
}

static struct rdma_cm_id *create(const char *host)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_flags = host ? 0 : RAI_PASSIVE }, *info;
	check(rdma_getaddrinfo(host, "7477", &hints, &info), "rdma_getaddrinfo");
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
		.sq_sig_all = 1, /* every READ makes a completion */
	};
	struct rdma_cm_id *id;
	check(rdma_create_ep(&id, info, NULL, &attr), "rdma_create_ep");
	rdma_freeaddrinfo(info);
	return id;
}

static void put(struct slot *table, char *pair)
{
	char *key = strsep(&pair, "="), *value = pair;
	if (!value)
		errx(2, "%s: not KEY=VALUE", key);
	if (strlen(key) >= KEY || strlen(value) >= VALUE)
		errx(1, "%s: key or value is too long", key);
	uint64_t at = hash(key, strlen(key)), end = at + SLOTS;
	while (table[at % SLOTS].sum)
		if (++at == end)
			errx(1, "%s: the table is full", key);
	struct slot *slot = &table[at % SLOTS];
	strcpy(slot->key, key);
	strcpy(slot->value, value);
	slot->sum = sum_of(slot);
}

static void serve(int clients, char **pairs)
{
	static struct slot table[SLOTS];
	for (; *pairs; pairs++)
		put(table, *pairs);
	struct rdma_cm_id *listener = create(NULL), *id;
	check(rdma_listen(listener, 0), "rdma_listen");
	printf("waiting for clients\n");
	fflush(stdout);
	for (; clients > 0; clients--) {
		check(rdma_get_request(listener, &id), "rdma_get_request");
		struct ibv_mr *mr = rdma_reg_read(id, table, sizeof table);
		check(!mr, "rdma_reg_read");
		struct offer offer = { (uintptr_t)table, mr->rkey };
		struct rdma_conn_param param = { &offer, sizeof offer, .responder_resources = 1 };
		check(rdma_accept(id, &param), "rdma_accept");
		/* The client parts when it is done. Meanwhile there is nothing to do. */
		struct rdma_cm_event *event;
		check(rdma_get_cm_event(id->channel, &event), "rdma_get_cm_event");
		rdma_ack_cm_event(event);
		rdma_disconnect(id);
		rdma_dereg_mr(mr);
		rdma_destroy_ep(id);
	}
	rdma_destroy_ep(listener);
}

static void get(const char *host, char **keys)
{
	struct rdma_cm_id *id = create(host);
	struct rdma_conn_param param = { .initiator_depth = 1, .retry_count = 7 };
	check(rdma_connect(id, &param), "rdma_connect");
	struct offer offer; /* there are 196 bytes of private data, zeroes behind the peer's */
	memcpy(&offer, id->event->param.conn.private_data, sizeof offer);
	struct slot slot;
	struct ibv_mr *mr = rdma_reg_msgs(id, &slot, sizeof slot);
	check(!mr, "rdma_reg_msgs");
	for (; *keys; keys++) {
		uint64_t at = hash(*keys, strlen(*keys)), end = at + SLOTS;
		int found = 0, tries = 0;
		while (!found && at < end) {
			uint64_t address = offer.address + at % SLOTS * sizeof slot;
			struct ibv_wc wc;
			check(rdma_post_read(id, NULL, &slot, sizeof slot, mr, 0, address, offer.rkey), "READ");
			check(rdma_get_send_comp(id, &wc) < 0, "rdma_get_send_comp");
			if (wc.status)
				errx(1, "READ: %s", ibv_wc_status_str(wc.status));
			if (!slot.sum)
				break;
			if (slot.sum != sum_of(&slot)) {
				if (++tries == TRIES)
					errx(1, "the checksum of a slot stays wrong");
				continue; /* it was being written: READ it again */
			}
			found = !strncmp(slot.key, *keys, KEY);
			at++;
		}
		printf("%s = %.*s\n", *keys, VALUE, found ? slot.value : "(none)");
	}
	rdma_disconnect(id);
	rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
}

int main(int argc, char **argv)
{
	int clients; char rest;
	if (argc > 3 && !strcmp(argv[1], "serve") && sscanf(argv[2], "%9d%c", &clients, &rest) == 1 && clients > 0)
		serve(clients, argv + 3);
	else if (argc > 3 && !strcmp(argv[1], "get"))
		get(argv[2], argv + 3);
	else
		return fprintf(stderr, "usage: kv serve CLIENTS KEY=VALUE... | kv get HOST KEY...\n"), 2;
	return 0;
}
