/* Two devices of four are lost by a script. librdmacm begins before that, or after it, as the argument says. Either way it knows
 * the other two alone. */
#include "cm.h"

static void devices_are(const char *names)
{
	int count = -1;
	char found[256] = "";
	struct ibv_context **list = rdma_get_devices(&count);
	TRUE(list != NULL);
	for (int i = 0; i < count; i++) {
		strcat(found, " ");
		strcat(found, ibv_get_device_name(list[i]->device));
	}
	TRUE(!list[count]);
	rdma_free_devices(list);
	if (strcmp(found, names))
		fprintf(stderr, "found:%s\n", found);
	EQ(strcmp(found, names), 0);
}

static void fails(struct ibv_context *ctx)
{
	struct ibv_async_event event;
	OK(ibv_get_async_event(ctx, &event));
	EQ(event.event_type, IBV_EVENT_DEVICE_FATAL);
	ibv_ack_async_event(&event);
}

static void addr_error(struct rdma_event_channel *c, struct rdma_cm_id *id)
{
	struct rdma_cm_event *e = expect(c, id, RDMA_CM_EVENT_ADDR_ERROR);
	EQ(e->status, -ENODEV);
	OK(rdma_ack_cm_event(e));
}

/* A new id at the address of a lost device. */
static void refuses(struct rdma_event_channel *c, const char *ip)
{
	struct sockaddr_storage at = address(ip, 0), to = address("127.0.0.4", 7471);
	struct rdma_cm_id *id = new_id(c, NULL, RDMA_PS_TCP);
	MINUS_ONE(rdma_bind_addr(id, sa(&at)), ENODEV);
	/* The call with such a source binds the id first. */
	MINUS_ONE(rdma_resolve_addr(id, sa(&at), sa(&to), 1000), ENODEV);
	TRUE(!id->verbs);
	OK(rdma_destroy_id(id));
}

int main(int argc, char **argv)
{
	EQ(argc, 2);
	int is_before = !strcmp(argv[1], "before"), count;
	struct ibv_device **list = ibv_get_device_list(&count);
	EQ(count, 4);
	struct ibv_context *fatal = ibv_open_device(list[0]), *removed = ibv_open_device(list[1]);
	TRUE(removed && fatal);
	ibv_free_device_list(list);
	struct rdma_event_channel *c = channel();
	struct rdma_cm_id *bound = new_id(c, NULL, RDMA_PS_TCP), *id = new_id(c, NULL, RDMA_PS_TCP);
	struct sockaddr_storage at = address("127.0.0.2", 0), to = address("127.0.0.4", 7471);
	if (is_before) {
		devices_are(" anyverbs0 anyverbs1 anyverbs2 anyverbs3");
		OK(rdma_bind_addr(bound, sa(&at)));
	}
	fails(fatal);
	fails(removed);
	devices_are(" anyverbs2 anyverbs3");
	refuses(c, "127.0.0.1");
	refuses(c, "127.0.0.2");
	if (is_before) {
		expect_ok(c, bound, RDMA_CM_EVENT_DEVICE_REMOVAL);
		OK(rdma_resolve_addr(bound, NULL, sa(&to), 1000));
		addr_error(c, bound);
	}
	/* The host's routes choose 127.0.0.1. */
	OK(rdma_resolve_addr(id, NULL, sa(&to), 1000));
	addr_error(c, id);
	OK(rdma_destroy_id(id));
	at = address("127.0.0.3", 0);
	id = new_id(c, NULL, RDMA_PS_TCP);
	OK(rdma_resolve_addr(id, sa(&at), sa(&to), 1000));
	expect_ok(c, id, RDMA_CM_EVENT_ADDR_RESOLVED);
	EQ(strcmp(ibv_get_device_name(id->verbs->device), "anyverbs2"), 0);
	OK(rdma_destroy_id(id));
	OK(rdma_destroy_id(bound));
	rdma_destroy_event_channel(c);
	return 0;
}
