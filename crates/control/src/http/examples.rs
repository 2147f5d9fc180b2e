//! Examples in the OpenAPI document. Every request and response shows the example of its type. The
//! type defines it (`#[schema(example = …)]`), so a new operation needs no example of its own.

use std::collections::BTreeMap;

use godwit_api::control::{Problem, ProblemCode};
use serde_json::{Map, Value};
use utoipa::openapi::content::Content;
use utoipa::openapi::schema::{ArrayItems, Schema};
use utoipa::openapi::{OpenApi, RefOr};

use crate::answers::operations;

/// Types by their names in the document.
type Schemas = BTreeMap<String, RefOr<Schema>>;

/// Depth limit for the search through types, which may contain themselves.
const MOST_DEEP: usize = 16;

/// Gives each request and response without an example the one of its type.
pub(crate) fn describe(document: &mut OpenApi) {
    let schemas: Schemas = document
        .components
        .iter()
        .flat_map(|components| &components.schemas)
        .map(|(name, schema)| (name.clone(), schema.clone()))
        .collect();
    // A failure of the manager is not an example of a faulty request.
    let remedy = "check the store (docs/store.md); running VMs are not affected";
    let failed = Problem::new(ProblemCode::StoreAway, "the store does not answer", remedy);
    let failed = serde_json::to_value(failed).ok();
    for operation in document.paths.paths.values_mut().flat_map(operations) {
        if let Some(RefOr::T(body)) = &mut operation.request_body {
            body.content.values_mut().for_each(|content| show(content, None, &schemas));
        }
        for (status, response) in &mut operation.responses.responses {
            let RefOr::T(response) = response else { continue };
            let of_status = if status.starts_with('5') { failed.as_ref() } else { None };
            response.content.values_mut().for_each(|content| show(content, of_status, &schemas));
        }
    }
}

fn show(content: &mut RefOr<Content>, better: Option<&Value>, schemas: &Schemas) {
    let RefOr::T(content) = content else { return };
    if content.example.is_none() && content.examples.is_empty() {
        let of_type = || content.schema.as_ref().and_then(|schema| example(schema, schemas, 0));
        content.example = better.cloned().or_else(of_type);
    }
}

/// Returns a type's own example, or one composed of the examples of its parts.
fn example(schema: &RefOr<Schema>, schemas: &Schemas, deep: usize) -> Option<Value> {
    if deep > MOST_DEEP {
        return None;
    }
    let schema = match schema {
        RefOr::T(schema) => schema,
        RefOr::Ref(to) => {
            let name = to.ref_location.rsplit('/').next()?;
            return example(schemas.get(name)?, schemas, deep + 1);
        }
    };
    match schema {
        Schema::Object(object) => object.example.clone().or_else(|| {
            let shown = object.properties.iter();
            let shown: Map<String, Value> = shown
                .filter_map(|(name, part)| Some((name.clone(), example(part, schemas, deep + 1)?)))
                .collect();
            let is_whole = object.required.iter().all(|name| shown.contains_key(name));
            (!shown.is_empty() && is_whole).then_some(Value::Object(shown))
        }),
        Schema::Array(array) => array.example.clone().or_else(|| match &array.items {
            ArrayItems::RefOrSchema(item) => {
                Some(Value::Array(vec![example(item, schemas, deep + 1)?]))
            }
            ArrayItems::False => None,
        }),
        Schema::OneOf(one_of) => one_of.example.clone(),
        Schema::AllOf(all_of) => all_of.example.clone(),
        Schema::AnyOf(any_of) => any_of.example.clone(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::RenameVm;
    use godwit_api::control::*;
    use godwit_api::{
        AdoptGuest, Adoption, CreateDisk, CreateSnapshot, DiskInfo, DiskList, DriveChange,
        ExportVm, ForeignGuest, FreezeVm, GuestInfo, ImportVm, JobStatus, JobSummary, KeepDisk,
        KeptDisk, KeptDisks, MoveDisk, NicChange, ResizeDisk, SetNicLink, SetTemplate,
        SnapshotInfo, VmImages,
    };
    use godwit_types::Report;
    use http::Method;
    use serde::Serialize;
    use serde::de::DeserializeOwned;

    use crate::http::tests::Managed;

    use super::*;

    /// Result of reading an example as its type, or the reason why that fails.
    type Read = fn(&Value) -> Result<Value, String>;

    fn read<T: DeserializeOwned + Serialize>(example: &Value) -> Result<Value, String> {
        let read: T = serde_json::from_value(example.clone()).map_err(|error| error.to_string())?;
        serde_json::to_value(read).map_err(|error| error.to_string())
    }

    macro_rules! types {
        ($($name:ident),* $(,)?) => { [$((stringify!($name), read::<$name> as Read)),*] };
    }

    /// Returns all types of requests and responses. Add each new type here; for lists and pages,
    /// add the type of the items.
    fn types() -> BTreeMap<&'static str, Read> {
        let managers = types![
            AcknowledgeAlarm,
            AddHost,
            Alarm,
            AlarmTest,
            AuditEntry,
            BaselineVm,
            BindVm,
            CertificateInfo,
            ChangeManagedVm,
            ChangedVm,
            CloneManagedVm,
            Cluster,
            ClusterEvent,
            ConfirmOff,
            CpuBaselineChange,
            CpuBaselineInfo,
            CreateDatastoreDrain,
            CreateDrain,
            CreateManagedVm,
            CreateMove,
            CreateRule,
            CreateToken,
            CreatedToken,
            DatastoreDetails,
            DatastoreDrain,
            Drain,
            FencingTest,
            HaSettings,
            HaStatus,
            HostSummary,
            HostedVm,
            JoinGrant,
            JoinRequest,
            JoinToken,
            JoinTokenInfo,
            Joined,
            JournalEntry,
            LoadHistory,
            LoadTop,
            ManagedDatastore,
            ManagedHost,
            ManagedNetwork,
            ManagedVm,
            Me,
            Move,
            MoveLimits,
            MoveSamples,
            NameConflict,
            Preflight,
            Problem,
            RevokedCertificates,
            RuleInfo,
            SetCpuBaseline,
            StartManagedVm,
            StopManagedVm,
            StreamedEvent,
            TokenInfo,
            UpdateDatastore,
            UpdateHost,
            UpdateLimits,
            VmSummary,
        ];
        managers.into_iter().chain(types_of_agents()).collect()
    }

    /// Returns the types of requests and responses that agents have, too.
    fn types_of_agents() -> BTreeMap<&'static str, Read> {
        BTreeMap::from(types![
            AdoptGuest,
            Adoption,
            CreateDisk,
            CreateSnapshot,
            DiskInfo,
            DiskList,
            DriveChange,
            ExportVm,
            ForeignGuest,
            FreezeVm,
            GuestInfo,
            ImportVm,
            JobStatus,
            JobSummary,
            KeepDisk,
            KeptDisk,
            KeptDisks,
            MoveDisk,
            NicChange,
            RenameVm,
            Report,
            ResizeDisk,
            SetNicLink,
            SetTemplate,
            SnapshotInfo,
            VmImages,
        ])
    }

    /// Returns whether everything in an example is in the value made of it. What is missing was not
    /// read. Null counts as absent.
    fn is_in(example: &Value, made: &Value) -> bool {
        match (example, made) {
            (Value::Object(example), Value::Object(made)) => example
                .iter()
                .all(|(name, value)| is_in(value, made.get(name).unwrap_or(&Value::Null))),
            (Value::Array(example), Value::Array(made)) => {
                example.len() == made.len()
                    && example.iter().zip(made).all(|(one, other)| is_in(one, other))
            }
            _ => example == made,
        }
    }

    fn check(schema: &Value, example: &Value) -> Result<(), String> {
        // A log is text.
        if schema["type"] == "string" {
            return example.as_str().map(drop).ok_or_else(|| "it is not text".to_owned());
        }
        if schema["type"] == "array" {
            let items = example.as_array().ok_or("it is not a list")?;
            return items.iter().try_for_each(|item| check(&schema["items"], item));
        }
        let name = schema["$ref"].as_str().and_then(|to| to.rsplit('/').next()).ok_or(
            "its body has no type of its own: add one (ToSchema) with an example \
             in crates/api/src/control",
        )?;
        if let Some(item) = name.strip_prefix("Page_") {
            let page: Page<Value> =
                serde_json::from_value(example.clone()).map_err(|error| error.to_string())?;
            let item = serde_json::json!({ "$ref": item });
            return page.items.iter().try_for_each(|one| check(&item, one));
        }
        let types = types();
        let read = types
            .get(name)
            .ok_or_else(|| format!("add {name} to the types of http/examples.rs"))?;
        let made = read(example)
            .map_err(|why| format!("{name} cannot read its example: {why}; fix it"))?;
        let unread = format!(
            "{name} does not read all of its example (result: {made}): \
             fix a name or a value in it"
        );
        is_in(example, &made).then_some(()).ok_or(unread)
    }

    /// Returns the faults in the contents of a request or a response.
    fn wrong(content: &Value) -> Vec<String> {
        let kinds = content.as_object().into_iter().flatten();
        let wrong = kinds.filter_map(|(_, content)| {
            let schema = &content["schema"];
            match content.get("example") {
                Some(example) => check(schema, example).err(),
                None => Some(format!(
                    "{schema} has no example: \
                     write #[schema(example = json!({{ … }}))] above the type"
                )),
            }
        });
        wrong.collect()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn every_request_and_response_has_an_example_that_its_type_reads() {
        let managed = Managed::begin().await;
        let document = managed.ask(Method::GET, "/api/openapi.json", None, None).await.body;
        let mut all = Vec::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let at = |part: &str, wrong: String| format!("{method} {path}, {part}: {wrong}");
                all.extend(
                    wrong(&operation["requestBody"]["content"])
                        .into_iter()
                        .map(|w| at("request", w)),
                );
                for (status, response) in operation["responses"].as_object().unwrap() {
                    // A connection that becomes a WebSocket has no body either.
                    let is_complete =
                        response["content"].is_object() || matches!(status.as_str(), "101" | "204");
                    let none = (!is_complete)
                        .then(|| "it has no body: add one, or use status 204".to_owned());
                    let wrong = wrong(&response["content"]).into_iter().chain(none);
                    all.extend(wrong.map(|wrong| at(status, wrong)));
                }
            }
        }
        assert!(all.is_empty(), "the OpenAPI document's examples:\n{}", all.join("\n"));
    }
}
