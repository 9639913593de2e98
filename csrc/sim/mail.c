#include "sim/mail.h"

#include <inttypes.h>

#include "base/assert.h"

struct lh_sim_message {
    struct lh_sim_transfer transfer;
    struct lh_sim_mail *mail;
    struct lh_sim_message *made_next; /* of all messages */
    struct lh_sim_message *free_next;
    uint32_t from;
    uint32_t to;
    enum lh_sim_mail_kind kind;
    uint32_t unit;
};

/* The latency of a message and its service, with room to spare. */
#define EVENTS_OF_MESSAGE 3

int lh_sim_mail_init(struct lh_sim_mail *mail, const struct lh_sim_mail_opts *opts,
                     struct lh_alloc *alloc, struct lh_error *err)
{
    uint32_t made_count = opts->is_mirror ? 1 : opts->node_count;
    LH_ASSERT(opts->node_count > 0);
    *mail = (struct lh_sim_mail){.opts = *opts, .alloc = alloc, .made_count = made_count};
    bool has_card =
        opts->card.bytes_per_s[LH_SIM_DIRECTION_WRITE] > 0 && opts->card.queue_depth > 0;
    if (opts->node_count > 1 && !has_card)
        return lh_error_set(err, -EINVAL, "%" PRIu32 " nodes need a card with a rate and a queue",
                            opts->node_count);
    uint32_t event_max = made_count * EVENTS_OF_MESSAGE * (opts->card.queue_depth + 1);
    LH_TRY(lh_sim_world_init(&mail->world, alloc, event_max, err));
    mail->nodes = lh_alloc_zeroed(alloc, made_count, sizeof(*mail->nodes));
    for (uint32_t i = 0; mail->nodes && i < made_count; i++) {
        struct lh_sim_node *node = &mail->nodes[i];
        if (has_card)
            lh_sim_link_init(&node->card, &mail->world, &opts->card, NULL);
        node->value_counts = lh_alloc_zeroed(alloc, opts->unit_count, sizeof(uint64_t));
        if (!node->value_counts)
            return lh_error_set(err, -ENOMEM, "no memory for node %" PRIu32, i);
    }
    return mail->nodes ? 0
                       : lh_error_set(err, -ENOMEM, "no memory for %" PRIu32 " nodes", made_count);
}

void lh_sim_mail_deinit(struct lh_sim_mail *mail)
{
    while (mail->messages) {
        struct lh_sim_message *message = mail->messages;
        mail->messages = message->made_next;
        lh_free(mail->alloc, message);
    }
    for (uint32_t i = 0; mail->nodes && i < mail->made_count; i++)
        lh_free(mail->alloc, mail->nodes[i].value_counts);
    if (mail->alloc) {
        lh_free(mail->alloc, mail->nodes);
        lh_sim_world_deinit(&mail->world);
    }
    *mail = (struct lh_sim_mail){0};
}

/* Check invariant 1: the card received the message while the other node's card sent it. */
static void receive_check(struct lh_sim_mail *mail, struct lh_sim_node *node, uint64_t bytes)
{
    uint64_t rate = mail->opts.card.bytes_per_s[LH_SIM_DIRECTION_WRITE];
    uint64_t now_ns = mail->world.now_ns;
    if (now_ns - lh_sim_transfer_ns(bytes, rate) < node->received_ns)
        lh_sim_world_fail(&mail->world,
                          "two nodes send to node %" PRIu32
                          " at the same time: nodes are not equal, and none has an image",
                          (uint32_t)(node - mail->nodes));
    node->received_ns = now_ns;
}

static void arrived(struct lh_sim_transfer *transfer)
{
    struct lh_sim_message *message = transfer->owner;
    struct lh_sim_mail *mail = message->mail;
    /* See [Note: The image]. */
    struct lh_sim_node *node = &mail->nodes[mail->opts.is_mirror ? message->from : message->to];
    receive_check(mail, node, transfer->bytes);
    node->counts[message->kind]++;
    if (message->kind == LH_SIM_MAIL_VALUES)
        node->value_counts[message->unit]++;
    message->free_next = mail->free;
    mail->free = message;
}

static struct lh_sim_message *message_make(struct lh_sim_mail *mail)
{
    struct lh_sim_message *message = mail->free;
    if (message) {
        mail->free = message->free_next;
        return message;
    }
    message = lh_alloc_zeroed(mail->alloc, 1, sizeof(*message));
    if (!message) {
        (void)lh_error_set(&mail->err, -ENOMEM, "no memory for a message between nodes");
        return NULL;
    }
    message->made_next = mail->messages;
    mail->messages = message;
    return message;
}

void lh_sim_mail_send(struct lh_sim_mail *mail, uint32_t from, const struct lh_sim_letter *letter)
{
    LH_ASSERT(from < mail->made_count && letter->bytes > 0);
    struct lh_sim_node *node = &mail->nodes[from];
    for (uint32_t k = 1; k < mail->opts.node_count; k++) {
        struct lh_sim_message *message = message_make(mail);
        if (!message)
            return;
        struct lh_sim_message *made_next = message->made_next;
        *message = (struct lh_sim_message){
            .transfer = {.direction = LH_SIM_DIRECTION_WRITE,
                         .bytes = letter->bytes,
                         .done = arrived,
                         .owner = message},
            .mail = mail,
            .made_next = made_next,
            .from = from,
            .to = (from + k) % mail->opts.node_count,
            .kind = letter->kind,
            .unit = letter->unit,
        };
        node->sent_bytes += letter->bytes;
        lh_sim_link_submit(&node->card, &message->transfer);
    }
}

void lh_sim_mail_advance(struct lh_sim_mail *mail)
{
    uint64_t at_ns = lh_sim_world_next_ns(&mail->world);
    while (at_ns != UINT64_MAX && lh_sim_world_next_ns(&mail->world) == at_ns)
        (void)lh_sim_world_advance(&mail->world);
}

void lh_sim_mail_check(struct lh_sim_mail *mail)
{
    for (uint32_t i = 0; mail->opts.node_count > 1 && i < mail->made_count; i++)
        lh_sim_link_check(&mail->nodes[i].card);
}
