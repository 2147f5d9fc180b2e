//! Limits for concurrent moves.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

/// Response of `GET /api/v1/limits`: the current limits for concurrent moves. 0 prevents new moves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({
    "out_of_host": null, "into_host": null, "per_datastore": 128, "in_all": 20,
    "datastores": { "/srv/slow": 2 },
    "hosts": { "host-a": { "out": 1, "into": 2 } },
    "by_link": [{ "bits_per_s": null, "moves": 2 }, { "bits_per_s": 1_000_000_000, "moves": 4 }]
}))]
#[serde(default)]
pub struct MoveLimits {
    /// Moves out of each host without a limit of its own; absent: determined by the host's link.
    pub out_of_host: Option<u32>,
    /// Moves into each host without a limit of its own; absent: determined by the host's link.
    pub into_host: Option<u32>,
    /// Moves of VMs with disks on the same datastore, for datastores without a limit of their own.
    pub per_datastore: u32,
    /// Moves in the cluster; absent: unlimited.
    pub in_all: Option<u32>,
    /// Limits of single datastores, by path.
    pub datastores: BTreeMap<String, u32>,
    /// Limits of single hosts, from `most_moves` of the host or the manager's configuration.
    pub hosts: BTreeMap<String, HostMoves>,
    /// Limits derived from the speed of a host's link, slowest first.
    pub by_link: Vec<LinkMoves>,
}

/// Limits of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostMoves {
    /// Moves out of the host; absent: the general limit applies.
    pub out: Option<u32>,
    /// Moves into the host; absent: the general limit applies.
    pub into: Option<u32>,
}

/// Concurrent moves over a link, in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LinkMoves {
    /// Lowest link speed of this entry, in bits per second; absent: the speed is unknown.
    pub bits_per_s: Option<u64>,
    /// Number of moves.
    pub moves: u32,
}

/// Request of `PATCH /api/v1/limits`. An absent field stays unchanged; null restores the value of
/// the manager's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
#[schema(example = json!({ "in_all": 20, "out_of_host": null, "datastores": { "/srv/slow": 2 } }))]
pub struct UpdateLimits {
    /// Moves out of each host without a limit of its own.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 1_000_000)]
    pub out_of_host: Option<Option<u32>>,
    /// Moves into each host without a limit of its own.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 1_000_000)]
    pub into_host: Option<Option<u32>>,
    /// Moves of VMs with disks on the same datastore.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 1_000_000)]
    pub per_datastore: Option<Option<u32>>,
    /// Moves in the cluster.
    #[serde(deserialize_with = "named", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, maximum = 1_000_000)]
    pub in_all: Option<Option<u32>>,
    /// Limits of single datastores, by path. Datastores that are not listed stay unchanged.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(schema_with = datastore_numbers)]
    pub datastores: BTreeMap<String, Option<u32>>,
}

/// Returns the schema of a map from datastore paths to numbers or null.
fn datastore_numbers() -> Object {
    let path = ObjectBuilder::new()
        .schema_type(Type::String)
        .pattern(Some("^/"))
        .max_length(Some(1024))
        .build();
    let number = ObjectBuilder::new()
        .schema_type(SchemaType::from_iter([Type::Integer, Type::Null]))
        .minimum(Some(0))
        .maximum(Some(1_000_000));
    ObjectBuilder::new()
        .schema_type(Type::Object)
        .property_names(Some(path))
        .additional_properties(Some(number))
        .max_properties(Some(1000))
        .description(Some(
            "Limits of single datastores, by path; null removes one. Datastores that are not \
             listed stay unchanged.",
        ))
        .build()
}

/// Distinguishes null from an absent field.
pub(super) fn named<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_differs_from_an_absent_field() {
        let read: UpdateLimits =
            serde_json::from_str(r#"{"in_all":null,"out_of_host":3}"#).unwrap();
        assert_eq!(
            (read.in_all, read.out_of_host, read.into_host),
            (Some(None), Some(Some(3)), None)
        );
        assert_eq!(serde_json::to_string(&read).unwrap(), r#"{"out_of_host":3,"in_all":null}"#);
    }
}
